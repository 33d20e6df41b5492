"""Every fault that can be planted in the emulated device is seen by the test that is there for it, and by no accident.

Each probe is an assertion of the hardware suite in small. It must hold on a healthy device and fail on the broken one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

torch: Any = pytest.importorskip("torch", reason="the emulated device needs the extra `torch`")

from emulation import Requests, alone, broken, build, decode, prefill, prompt  # noqa: E402 - only where torch is
from reference_engine.runners.neuron.emulated import Behaviour, Fault, NewGraphError  # noqa: E402
from reference_engine.runners.neuron.emulated.configuration import GenerationConfig  # noqa: E402

A, B, C = prompt("a", 4), prompt("b", 11), prompt("c", 29)
STEPS = 16

Probe: TypeAlias = Callable[[Behaviour], bool]


def right(requests: Requests, *lines: int) -> bool:
    """Whether each line's output is what its prompt gives alone on a healthy device."""
    return all(
        requests.output(line) == alone(requests.tokens[line][: requests.lengths[line]], len(requests.output(line)))
        for line in lines or requests.tokens
    )


def alone_is_right(how: Behaviour) -> bool:
    return alone(B, STEPS, build(how)) == alone(B, STEPS)


def full_batch_is_right(how: Behaviour) -> bool:
    return right(Requests(build(how, lines=3)).start({0: A, 1: B, 2: C}).go(STEPS))


def short_after_long_is_right(how: Behaviour) -> bool:
    requests = Requests(build(how)).start({0: C}).go(STEPS)
    return right(requests.start({0: A}).go(STEPS))


def long_after_short_is_right(how: Behaviour) -> bool:
    requests = Requests(build(how)).start({0: A})
    return right(requests.start({0: C}).go(STEPS))


def widened_prompt_harms_nobody(how: Behaviour) -> bool:
    requests = Requests(build(how)).start({0: C}).go(2)
    return right(requests.start({3: [9]}, width=2).go(STEPS))


def rows_of_part_of_the_lines_are_right(how: Behaviour) -> bool:
    requests = Requests(build(how)).start({0: A, 1: B, 3: C}).go(2)
    del requests.tokens[0]  # finished
    return right(requests.go(STEPS), 1, 3)


def omission_does_damage(how: Behaviour) -> bool:
    requests = Requests(build(how)).start({0: B, 1: A})
    requests.go(1, lines=[1])
    return not right(requests.go(STEPS), 0)


def prompt_that_fills_its_bucket_is_right(how: Behaviour) -> bool:
    return right(Requests(build(how)).start({0: prompt("full", 32)}).go(STEPS))


def prompt_below_its_bucket_is_right(how: Behaviour) -> bool:
    return right(Requests(build(how)).start({0: prompt("full", 31), 1: A}).go(STEPS))


def prompt_beside_one_that_fills_the_bucket_is_right(how: Behaviour) -> bool:
    return right(Requests(build(how)).start({0: prompt("full", 32), 1: A}).go(STEPS), 1)


def crossing_a_token_bucket_is_right(how: Behaviour) -> bool:
    return right(Requests(build(how, tokens=(32, 64))).start({0: C}).go(STEPS))


def nothing_is_compiled_in_service(how: Behaviour) -> bool:
    model = build(how)
    Requests(model).start({0: A, 1: B}).go(3)
    return not model.ledger.late


def two_runs_are_alike(how: Behaviour) -> bool:
    runs = [Requests(build(how)).start({0: A}).go(STEPS).tokens for _ in range(2)]
    return runs[0] == runs[1]


def sampling_on_the_device_is_argmax(how: Behaviour) -> bool:
    on_device = build(how, on_device_generation=GenerationConfig(do_sample=True, top_k=1))
    on_host = build(how)
    given = [prefill(on_device, [2, 0], [A, B]), decode(on_device, [2, 0], [5, 6], [4, 11])]
    logits = [prefill(on_host, [2, 0], [A, B]), decode(on_host, [2, 0], [5, 6], [4, 11])]
    return [tokens.tolist() for tokens in given] == [rows.argmax(-1, keepdim=True).tolist() for rows in logits]


def reset_is_as_new(how: Behaviour) -> bool:
    used, new = build(how), build(how)
    Requests(used).start({0: C})
    used.reset()
    return bool(torch.equal(decode(used, [0], [5], [20]), decode(new, [0], [5], [20])))


def full_batch_in_any_order_is_right(how: Behaviour) -> bool:
    requests = Requests(build(how, lines=3)).start({2: A, 0: B, 1: C})
    return right(requests.go(STEPS))


PROBES: dict[Fault, Probe] = {
    Fault.LINES_LEAK: full_batch_is_right,
    Fault.STALE_ROWS_VISIBLE: short_after_long_is_right,
    Fault.PREFILL_TRUNCATED: long_after_short_is_right,
    Fault.PREFILL_TOUCHES_NEXT_LINE: widened_prompt_harms_nobody,
    Fault.PARTIAL_ROWS_PACKED: rows_of_part_of_the_lines_are_right,
    Fault.INACTIVE_LINES_IDLE: omission_does_damage,
    Fault.FULL_BUCKET_OFF_BY_ONE: prompt_that_fills_its_bucket_is_right,
    Fault.FULL_BUCKET_SHARED_END: prompt_beside_one_that_fills_the_bucket_is_right,
    Fault.TOKEN_BUCKET_LOSES_CACHE: crossing_a_token_bucket_is_right,
    Fault.LATE_COMPILE: nothing_is_compiled_in_service,
    Fault.NONDETERMINISTIC: two_runs_are_alike,
    Fault.SAMPLES_SECOND_BEST: sampling_on_the_device_is_argmax,
    Fault.RESET_KEEPS_ROWS: reset_is_as_new,
}
PASSED_BY: dict[Fault, tuple[Probe, ...]] = {
    Fault.LINES_LEAK: (alone_is_right,),
    Fault.STALE_ROWS_VISIBLE: (alone_is_right, full_batch_is_right, long_after_short_is_right),
    Fault.PREFILL_TRUNCATED: (alone_is_right, full_batch_is_right, short_after_long_is_right),
    Fault.PARTIAL_ROWS_PACKED: (full_batch_is_right,),
    Fault.INACTIVE_LINES_IDLE: (full_batch_is_right, alone_is_right),
    Fault.FULL_BUCKET_OFF_BY_ONE: (prompt_below_its_bucket_is_right,),
    Fault.FULL_BUCKET_SHARED_END: (prompt_below_its_bucket_is_right, prompt_that_fills_its_bucket_is_right),
    Fault.TOKEN_BUCKET_LOSES_CACHE: (alone_is_right, full_batch_is_right),
    Fault.LATE_COMPILE: (full_batch_is_right,),
    Fault.SAMPLES_SECOND_BEST: (full_batch_is_right,),
    Fault.RESET_KEEPS_ROWS: (full_batch_is_right, short_after_long_is_right),
}
"""What a fault does not touch: a probe that fails on everything would say little."""


def broken_device(fault: Fault) -> Behaviour:
    return broken(fault, forbid_new_graphs=False)


def test_every_fault_has_its_probe() -> None:
    assert set(PROBES) == set(Fault)


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.value)
def test_its_probe_holds_on_a_healthy_device_and_fails_on_a_broken_one(fault: Fault) -> None:
    assert PROBES[fault](Behaviour())
    assert not PROBES[fault](broken_device(fault))


@pytest.mark.parametrize(
    ("fault", "probe"),
    [(fault, probe) for fault, probes in PASSED_BY.items() for probe in probes],
    ids=lambda one: one.value if isinstance(one, Fault) else one.__name__,
)
def test_it_leaves_alone_what_it_is_not_about(fault: Fault, probe: Probe) -> None:
    assert probe(broken_device(fault))


def test_the_old_row_order_is_seen_by_a_full_decode_in_another_order() -> None:
    assert full_batch_in_any_order_is_right(Behaviour())
    assert not full_batch_in_any_order_is_right(Behaviour(row_order="old"))
    assert full_batch_is_right(Behaviour(row_order="old"))


def test_stale_rows_and_a_reset_that_keeps_them_go_together() -> None:
    def reused_after_reset(how: Behaviour) -> bool:
        model = build(how)
        Requests(model).start({0: C}).go(STEPS)
        return alone(A, STEPS, model) == alone(A, STEPS)

    assert reused_after_reset(broken(Fault.STALE_ROWS_VISIBLE))
    assert not reused_after_reset(broken(Fault.STALE_ROWS_VISIBLE, Fault.RESET_KEEPS_ROWS))


def test_a_late_graph_is_an_error_where_it_is_forbidden() -> None:
    with pytest.raises(NewGraphError, match="bucket=4"):
        prefill(build(broken(Fault.LATE_COMPILE)), [0], [A])


def test_faults_may_be_named_and_unknown_ones_are_refused() -> None:
    assert Behaviour(faults=["lines-leak", Fault.LATE_COMPILE]).faults == {Fault.LINES_LEAK, Fault.LATE_COMPILE}
    with pytest.raises(ValueError, match="no-such-fault"):
        Behaviour(faults=["no-such-fault"])
    with pytest.raises(TypeError, match="not one string"):
        Behaviour(faults="lines-leak")
