"""What the emulated device does when it is healthy: routes, buckets, rows, lines that run unasked, refusals."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="the emulated device needs the extra `torch`")

from emulation import (  # noqa: E402 - only where torch is
    VOCABULARY,
    Requests,
    alone,
    build,
    decode,
    prefill,
    prompt,
)
from reference_engine.runners.neuron.emulated import Behaviour, DeviceError, Graph  # noqa: E402

SHORT, MIDDLE, LONG = prompt("short", 3), prompt("middle", 17), prompt("long", 30)


def last_call(model: Any) -> Any:
    return model.ledger.calls[-1]


# ------------------------------------------------------------------------------------------- routes and buckets


def test_a_prompt_runs_on_the_smallest_context_bucket_that_holds_it() -> None:
    model = build(context=(8, 16, 32))
    for length, bucket in ((2, 8), (7, 8), (8, 8), (9, 16), (32, 32)):
        prefill(model, [1], [prompt("any", length)])
        assert last_call(model).graph == Graph("prefill", bucket, 1)
        assert last_call(model).width == length


def test_a_decode_runs_on_the_smallest_token_bucket_that_holds_its_largest_position() -> None:
    model = build(tokens=(32, 64, 128))
    for positions, bucket in (([0, 31], 32), ([32, 0], 64), ([5, 64], 128)):
        decode(model, [0, 3], [1, 2], positions)
        assert last_call(model).graph == Graph("decode", bucket, 4)


def test_a_position_on_an_idle_line_does_not_decide_the_bucket() -> None:
    model = build(tokens=(32, 64))
    requests = Requests(model).start({0: LONG, 1: SHORT}).go(10)
    assert last_call(model).graph.bucket == 64
    requests.go(1, lines=[1])
    assert last_call(model).graph.bucket == 32


def test_a_prompt_beyond_the_largest_context_bucket_is_an_assertion() -> None:
    model = build(context=(16, 32))
    with pytest.raises(AssertionError, match="invalid input prompt length"):
        prefill(model, [0], [prompt("any", 33)])


def test_a_position_beyond_the_largest_token_bucket_stops_the_lookup() -> None:
    model = build(tokens=(64,))
    decode(model, [0], [1], [63])
    with pytest.raises(StopIteration):
        decode(model, [0], [1], [64])


def test_without_a_context_bucket_there_is_no_prefill() -> None:
    with pytest.raises(TypeError, match="no prefill graph"):
        prefill(build(context=0), [0], [SHORT])


def test_prompts_run_one_after_another_and_their_number_is_not_bounded() -> None:
    model = build(lines=2)
    prefill(model, [0, 1, 0], [SHORT, LONG, MIDDLE])
    assert [call.lines for call in model.ledger.calls] == [(0,), (1,), (0,)]
    assert model.ledger.prefills == 3
    assert Requests(model).start({0: MIDDLE}).go(5).output(0) == alone(MIDDLE, 6)


def test_rows_of_a_prefill_come_back_in_the_order_of_the_input() -> None:
    model = build()
    together = prefill(model, [3, 0, 2], [LONG, SHORT, MIDDLE])
    for row, one in zip(together, (LONG, SHORT, MIDDLE), strict=True):
        assert row.dtype == torch.float32
        assert row.shape == (VOCABULARY,)
        assert torch.equal(row, prefill(model, [1], [one])[0])


@pytest.mark.parametrize("shape", ["[n]", "[n, 1]"])
@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_lines_may_come_as_a_column_and_integers_in_either_width(shape: str, dtype: str) -> None:
    model = build()
    kind = getattr(torch, dtype)
    lines = torch.tensor([2, 0], dtype=kind)
    lines = lines if shape == "[n]" else lines[:, None]
    ids = torch.tensor([SHORT, SHORT[::-1]], dtype=kind)
    positions = torch.arange(3, dtype=kind).expand(2, 3)
    rows = model(ids, cache_ids=positions, start_ids=lines)
    assert torch.equal(rows, prefill(model, [2, 0], [SHORT, SHORT[::-1]]))
    rows = model(ids[:, :1], cache_ids=positions[:, :1] + 3, start_ids=lines)
    assert rows.shape == (2, VOCABULARY)


def test_a_width_of_one_decodes_even_at_position_0() -> None:
    model = build()
    decode(model, [1], [77], [0])
    assert last_call(model).route == "decode"
    assert last_call(model).inactive == (0, 2, 3)


def test_a_width_above_one_from_a_later_position_is_no_route() -> None:
    with pytest.raises(AssertionError, match="speculation"):
        build()(torch.tensor([[1, 2]]), cache_ids=torch.tensor([[4, 5]]), start_ids=torch.tensor([0]))


# ---------------------------------------------------------------------------------------- what is written where


def rows(model: Any, line: int, start: int = 0, end: int | None = None) -> Any:
    """Keys and values of a line at positions [start, end)."""
    return model.cache.line(line)[..., start:end, :]


def test_a_prefill_writes_its_whole_bucket_and_no_other_line() -> None:
    model = build(context=(16, 32))
    prefill(model, [2], [SHORT])
    assert rows(model, 2, 0, 16).abs().flatten(-2).sum(-1).min() > 0  # padding is written like tokens
    assert rows(model, 2, 3, 16).abs().sum() > 0
    assert not rows(model, 2, 16).any()
    for line in (0, 1, 3):
        assert not rows(model, line).any()


def test_a_decode_writes_one_row_and_position_0_of_every_line_left_out() -> None:
    model = build()
    prefill(model, [0, 1, 2], [SHORT, MIDDLE, LONG])
    before = [rows(model, line) for line in range(4)]
    decode(model, [1], [5], [17])
    after = [rows(model, line) for line in range(4)]
    changed = [
        sorted(set((one != other).any(-1).nonzero()[:, 3].tolist())) for one, other in zip(before, after, strict=True)
    ]
    assert changed == [[0], [17], [0], [0]]
    fresh = build()
    decode(fresh, [3], [0], [0])
    assert torch.equal(after[0][..., :1, :], rows(fresh, 3, 0, 1))  # token 0 at position 0


def test_a_line_left_out_of_a_decode_goes_wrong_until_it_is_prefilled_again() -> None:
    model = build()
    requests = Requests(model).start({0: MIDDLE, 1: SHORT}).go(5)
    requests.go(1, lines=[1])
    requests.go(20)
    assert requests.output(1) == alone(SHORT, 27)
    assert requests.output(0) != alone(MIDDLE, 26)
    resumed = requests.start({0: MIDDLE}).go(20)
    assert resumed.output(0) == alone(MIDDLE, 21)


def test_a_prompt_of_one_token_damages_every_other_line() -> None:
    model = build()
    requests = Requests(model).start({0: MIDDLE, 2: LONG})
    requests.start({1: [77]}, width=1)
    requests.go(20)
    assert requests.output(1) == alone([77], 21)
    assert requests.output(0) != alone(MIDDLE, 21)
    assert requests.output(2) != alone(LONG, 21)


@pytest.mark.parametrize("others", [[], [MIDDLE]], ids=["widened", "beside a longer one"])
def test_a_prompt_of_one_token_in_a_wider_row_harms_nobody(others: list[list[int]]) -> None:
    model = build(tokens=(128,))
    requests = Requests(model).start({0: LONG}).go(3)
    requests.start({3: [77], **dict(enumerate(others, start=1))}, width=17 if others else 2)
    requests.go(20)
    assert requests.output(3) == alone([77], 21)
    assert requests.output(0) == alone(LONG, 24)


def test_rows_after_its_own_position_are_never_read_by_a_sequence() -> None:
    model = build(tokens=(128,))
    Requests(model).start({1: LONG}).go(40)
    assert rows(model, 1, 60, 70).any()
    assert Requests(model).start({1: SHORT}).go(30).output(1) == alone(SHORT, 31)
    assert Requests(model).start({1: LONG}).go(30).output(1) == alone(LONG, 31)


def test_a_finished_line_keeps_its_rows_and_reset_zeroes_them() -> None:
    model = build()
    first = Requests(model).start({1: LONG, 0: SHORT}).go(4)
    assert rows(model, 1).any()
    model.reset()
    assert not any(rows(model, line).any() for line in range(4))
    assert Requests(model).start({1: LONG, 0: SHORT}).go(4).tokens == first.tokens


def test_the_graphs_of_all_token_buckets_share_one_cache() -> None:
    model = build(tokens=(32, 64, 128))
    crossing = Requests(model).start({1: LONG, 0: SHORT}).go(60)
    assert {graph.bucket for graph in model.ledger.executions if graph.route == "decode"} == {32, 64, 128}
    assert crossing.output(1) == alone(LONG, 61)
    assert crossing.output(0) == alone(SHORT, 61)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32])
def test_prompts_at_the_edge_of_a_bucket_are_exact(length: int) -> None:
    model = build(context=(16, 32), tokens=(128,))
    one = prompt("edge", length)
    requests = Requests(model).start({0: one, 3: SHORT}).go(20)
    assert requests.output(0) == alone(one, 21)
    assert requests.output(3) == alone(SHORT, 21)


def test_at_the_exact_width_the_padding_of_shorter_rows_turns_at_position_0_and_harms_nobody() -> None:
    narrow, exact = build(), build()
    prefill(narrow, [0, 1], [SHORT, prompt("any", 31)])
    prefill(exact, [0, 1], [SHORT, prompt("any", 32)])
    assert torch.equal(rows(narrow, 0, 0, 3), rows(exact, 0, 0, 3))
    keys = [rows(model, 0, 3)[0] for model in (narrow, exact)]
    assert not torch.equal(*keys)


# --------------------------------------------------------------------------------------- lines that do not exist


def test_a_prefill_on_line_n_writes_over_line_0_shifted_by_one() -> None:
    model = build()
    prefill(model, [3], [SHORT])
    right = rows(model, 3, 0, 32)
    prefill(model, [4], [SHORT])
    assert torch.equal(rows(model, 0, 1, 32), right[..., :31, :])
    assert not rows(model, 0, 0, 1).any()
    assert not rows(model, 0, 32).any()


def test_a_prefill_below_line_0_writes_over_the_last_line_shifted_back() -> None:
    model = build()
    prefill(model, [0], [SHORT])
    right = rows(model, 0, 0, 32)
    prefill(model, [-1], [SHORT])
    assert torch.equal(rows(model, 3, 0, 31), right[..., 1:32, :])
    assert not rows(model, 3, 31).any()


def test_rows_outside_the_bucket_can_be_an_error_of_the_device_that_writes_nothing() -> None:
    model = build(Behaviour(out_of_range="raise"))
    for line in (4, -1):
        with pytest.raises(DeviceError, match=r"status 1006") as failure:
            prefill(model, [line], [SHORT])
        assert failure.value.status == 1006
    assert not model.cache.keys.any()
    prefill(model, [3], [SHORT])


def test_the_only_line_is_replaced_whatever_its_number() -> None:
    other, right = build(Behaviour(out_of_range="raise"), lines=1), build(lines=1)
    prefill(other, [1], [MIDDLE])
    prefill(right, [0], [MIDDLE])
    assert torch.equal(rows(other, 0), rows(right, 0))
    assert Requests(right).start({0: MIDDLE}).go(10).output(0) == alone(MIDDLE, 11)


@pytest.mark.parametrize(("order", "error"), [("new", RuntimeError), ("old", IndexError)])
def test_a_decode_on_a_line_that_does_not_exist_fails_on_the_host(order: Any, error: type[Exception]) -> None:
    model = build(Behaviour(row_order=order))
    with pytest.raises(error, match=r"out of (bounds|range)"):
        decode(model, [4], [1], [0])
    assert not model.ledger.calls


def test_more_rows_than_lines_cannot_be_decoded() -> None:
    with pytest.raises(ValueError, match="5 rows to decode: the model has 4 lines"):
        decode(build(), [0, 1, 2, 3, 0], [1] * 5, [0] * 5)


# ------------------------------------------------------------------------------------------------------ row order


def by_line(model: Any, lines: list[int]) -> tuple[Any, Any]:
    """Logits of a decode of ``lines`` as they come, and as they should, after prompts on all four lines."""
    prefill(model, [0, 1, 2, 3], [SHORT, MIDDLE, LONG, SHORT[::-1]])
    came = decode(model, lines, [7 + line for line in lines], [[3, 17, 30, 3][line] for line in lines])
    right = build()
    prefill(right, [0, 1, 2, 3], [SHORT, MIDDLE, LONG, SHORT[::-1]])
    every = decode(right, [0, 1, 2, 3], [7, 8, 9, 10], [3, 17, 30, 3])
    return came, every[lines]


@pytest.mark.parametrize("lines", [[0, 1, 2, 3], [3, 1, 0, 2], [2, 0], [3]])
def test_rows_of_a_decode_come_back_in_the_order_asked_for(lines: list[int]) -> None:
    came, right = by_line(build(), lines)
    assert torch.equal(came, right)


def test_the_old_order_returns_a_full_decode_by_line_and_a_partial_one_as_asked() -> None:
    old = Behaviour(row_order="old")
    came, right = by_line(build(old), [2, 0])
    assert torch.equal(came, right)
    came, right = by_line(build(old), [0, 1, 2, 3])
    assert torch.equal(came, right)
    came, right = by_line(build(old), [3, 1, 0, 2])
    assert torch.equal(came[[3, 1, 0, 2]], right)
    assert not torch.equal(came, right)


def test_many_lines_are_each_exact() -> None:
    model = build(lines=64)
    prompts = {line: prompt(str(line), 2 + line % 30) for line in range(64)}
    requests = Requests(model).start(prompts).go(8)
    for line in range(0, 64, 9):
        assert requests.output(line) == alone(prompts[line], 9)
