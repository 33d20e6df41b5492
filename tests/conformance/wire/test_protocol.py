"""What is on the wire: the published schema is that of the structs, and all traffic is valid against it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conformance.engines import load
from conformance.protocol import EngineConfig, Sampled, Snapshot
from conformance.wire import schema
from conformance.wire.lines import LineBuffer, LineTooLong, ambiguity
from conformance.wire.messages import Books, SampledSequence, from_books, from_pairs, to_books, to_pairs
from conformance.wire.process import Process
from fuzz.driver import Driver

PUBLISHED = Path(__file__).parents[3] / "docs" / "reference" / "wire-schema.json"
SNAPSHOT = Snapshot(
    free=[3, 3], cached=[1], reserved=[0], held={"r1": [[2], []], "r0": []}, ref_counts={2: 1, -5: 7}, swap_free=[0],
    waiting=["r0"], running=["r1"], swapped=["r2"],
)  # fmt: skip


def test_the_published_schema_is_up_to_date(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert schema.main(["--check", str(PUBLISHED)]) == 0
    stale = tmp_path / "schema.json"
    stale.write_text(PUBLISHED.read_text(encoding="utf-8").replace("schedule", "plan", 1), encoding="utf-8")
    assert schema.main(["--check", str(stale)]) == 1
    assert f"run python -m conformance.wire.schema --write {stale}" in capsys.readouterr().err
    schema.main(["--write", str(stale)])
    assert stale.read_bytes() == PUBLISHED.read_bytes()


def test_all_traffic_of_a_campaign_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[tuple[bytes, bytes]] = []
    exchange = Process.exchange

    def listening(process: Process, line: bytes, seconds_max: float | None = None) -> bytes:
        answer = exchange(process, line, seconds_max)
        lines.append((line, answer))
        return answer

    monkeypatch.setattr(Process, "exchange", listening)
    source = load(f"reference@{sys.executable}", validate_wire=True)
    engine = source.factory(EngineConfig())
    driver = Driver(source.factory, engine.capabilities, seed=1)
    engine.close()
    for index in range(12):
        assert not driver.run(index).violations
    validator: Any = pytest.importorskip("jsonschema").Draft202012Validator
    published: dict[str, Any] = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    validator.check_schema(published)
    calls, answers = (validator({**published, "anyOf": [{"$ref": f"#/$defs/{side}"}]}) for side in ("Call", "Answer"))
    seen: Counter[str] = Counter()
    for line in lines:
        call, answer = json.loads(line[0]), json.loads(line[1])
        kind = f"{call['call']} {answer['answer']}"
        seen[kind] += 1
        if seen[kind] <= 25:  # every kind, and not the whole day
            calls.validate(call)
            answers.validate(answer)
            assert not answers.is_valid(call)
            assert not calls.is_valid(answer)
    names = ("make", "add_request", "abort_request", "schedule", "commit", "snapshot", "close")
    assert seen.keys() >= {*(f"{name} {name}" for name in names), "add_request refused"}


def test_a_snapshot_comes_back_as_it_was() -> None:
    books = msgspec.json.decode(msgspec.json.encode(to_books(SNAPSHOT)), type=Books)
    assert from_books(books) == SNAPSHOT
    assert list(from_books(books).held) == ["r1", "r0"]
    assert Books.__struct_fields__ == Snapshot.__struct_fields__
    assert from_books(to_books(Snapshot(free=[]))) == Snapshot(free=[])


def test_the_tokens_of_a_commit_come_back_as_they_were() -> None:
    tokens = {("r0", 0): Sampled([4]), ("r0", 1): Sampled([5, 6], [7])}
    pairs = msgspec.json.decode(msgspec.json.encode(to_pairs(tokens)), type=list[SampledSequence])
    assert from_pairs(pairs) == tokens
    assert SampledSequence.__struct_fields__ == ("request_id", "seq", *Sampled.__struct_fields__)


def test_what_is_there_twice_is_not_taken_once() -> None:
    books = to_books(SNAPSHOT)
    with pytest.raises(ValueError, match="held names 'r1' twice"):
        from_books(msgspec.structs.replace(books, held=[*books.held, books.held[0]]))
    with pytest.raises(ValueError, match="ref_counts names 2 twice"):
        from_books(msgspec.structs.replace(books, ref_counts=[(2, 1), (2, 1)]))
    with pytest.raises(ValueError, match="sampled names"):
        from_pairs([SampledSequence("r0", 0, [1]), SampledSequence("r0", 0, [1])])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"id":1,"free":[],"id":2}', "the key 'id' is there twice"),
        (b'{"a":{"b":[{"c":1,"c":1}]}}', "the key 'c' is there twice"),
        (b'{"watermark":NaN}', "NaN is no JSON number"),
        (b'{"watermark":-Infinity}', "-Infinity is no JSON number"),
        (b"{", "Expecting property name"),
        (b'{"id":1,"free":[1,1]}', ""),
    ],
)
def test_ambiguous_json_is_seen(line: bytes, said: str) -> None:
    assert ambiguity(line).startswith(said)
    assert bool(ambiguity(line)) is bool(said)


def test_lines_are_taken_whole_and_in_order_from_any_pieces() -> None:
    buffer = LineBuffer()
    taken = []
    for byte in b"one\n\ntwo\nrest":
        buffer.feed(bytes([byte]))
        line = buffer.take()
        if line is not None:
            taken.append(line)
    assert taken == [b"one", b"", b"two"]
    assert buffer.rest() == b"rest"
    buffer.feed(b"!\nx\ny")
    assert [buffer.take(), buffer.take(), buffer.take()] == [b"rest!", b"x", None]


def test_a_line_without_an_end_is_not_collected_for_ever() -> None:
    buffer = LineBuffer(bytes_max=10)
    buffer.feed(b"0123456789")
    assert buffer.take() is None
    buffer.feed(b"a")
    with pytest.raises(LineTooLong, match="more than 10 bytes"):
        buffer.take()
