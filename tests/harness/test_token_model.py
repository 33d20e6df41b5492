"""The harness as the model: prompts by family, one node for one prefix, the next token a function of it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.operations import Add
from conformance.protocol import EncoderItem
from conformance.token_model import FIRST_TOKEN, STOP_TOKEN, VOCABULARY_SIZE, PrefixTree, prompt_tokens, request_from

TOKENS = st.lists(st.integers(FIRST_TOKEN, FIRST_TOKEN + 2), min_size=1, max_size=6)


def test_a_family_shares_its_prefix_and_nothing_else() -> None:
    one = prompt_tokens(Add(12, 1, family=3, shared_len=5), 0)
    other = prompt_tokens(Add(9, 1, family=3, shared_len=5), 1)
    stranger = prompt_tokens(Add(9, 1, family=4, shared_len=5), 2)
    assert one[:5] == other[:5]
    assert one[5:9] != other[5:]
    assert one[:5] != stranger[:5]


@given(st.integers(1, 200), st.integers(0, 50), st.integers(0, 9))
def test_prompts_keep_off_padding_and_the_stop_token(prompt_len: int, shared_len: int, ordinal: int) -> None:
    tokens = prompt_tokens(Add(prompt_len, 1, shared_len=shared_len), ordinal)
    assert len(tokens) == prompt_len
    assert all(FIRST_TOKEN <= token < VOCABULARY_SIZE for token in tokens)
    assert STOP_TOKEN < FIRST_TOKEN


def test_lengths_below_one_become_one() -> None:
    request = request_from(Add(0, 0, n=0), 7)
    assert (request.request_id, len(request.prompt), request.max_tokens, request.n) == ("r7", 1, 1, 1)


def test_encoder_items_lie_one_after_the_other_inside_the_prompt() -> None:
    request = request_from(Add(7, 1, family=2, encoder_sizes=(3, 9, 4)), 0)
    assert request.encoder_items == (EncoderItem("item2.0:3", 0, 3), EncoderItem("item2.1:4", 3, 4))


def test_items_of_one_key_are_of_one_size() -> None:
    keys = [request_from(Add(9, 1, encoder_sizes=(size,)), 0).encoder_items[0].key for size in (2, 3)]
    assert len(set(keys)) == 2


@settings(max_examples=200, deadline=None, derandomize=True)
@given(one=TOKENS, other=TOKENS, salted=st.booleans())
def test_two_positions_have_one_node_exactly_when_prefix_and_identity_agree(
    one: list[int], other: list[int], *, salted: bool
) -> None:
    tree = PrefixTree()
    plain, second = request_from(Add(1, 1), 0), request_from(Add(1, 1, salt=1 if salted else 0), 1)
    nodes, others = tree.walk(plain, one), tree.walk(second, other)
    for at, node in enumerate(nodes):
        for there, found in enumerate(others):
            assert (node == found) == (not salted and one[: at + 1] == other[: there + 1])
            assert tree.same_identity(node, found) == (not salted)


@given(TOKENS)
def test_the_next_token_depends_on_the_prefix_and_not_on_the_salt(tokens: list[int]) -> None:
    tree = PrefixTree()
    plain = tree.walk(request_from(Add(1, 1), 0), tokens)[-1]
    salted = tree.walk(request_from(Add(1, 1, salt=1), 1), tokens)[-1]
    assert plain != salted
    assert tree.next_token(plain, 0) == tree.next_token(salted, 0)
    assert FIRST_TOKEN <= tree.next_token(plain, 0) < VOCABULARY_SIZE


def test_sequences_of_one_request_part_ways_at_their_first_token() -> None:
    tree = PrefixTree()
    node = tree.walk(request_from(Add(1, 1), 0), [5, 6])[-1]
    assert len({tree.next_token(node, seq) for seq in range(4)}) == 4


def test_a_real_model_decides_once_for_each_prefix_whatever_the_sequence_or_salt() -> None:
    asked: list[list[int]] = []

    def model(tokens: list[int]) -> int:
        asked.append(tokens)
        return 500 + len(tokens)

    tree = PrefixTree(model)
    nodes = tree.walk(request_from(Add(1, 1, salt=1), 0), [5, 6, 99_999])
    assert [tree.next_token(node, seq) for node in nodes for seq in (0, 1)] == [501, 501, 502, 502, 503, 503]
    assert asked == [[5], [5, 6], [5, 6, 99_999]]


@given(st.lists(st.integers(0, (1 << 20) - 1), min_size=1, max_size=4), st.integers(0, (1 << 20) - 1))
def test_prefixes_of_a_large_vocabulary_stay_apart(tokens: list[int], other: int) -> None:
    tree = PrefixTree()
    plain = request_from(Add(1, 1), 0)
    agree = tree.walk(plain, tokens)[-1] == tree.walk(plain, [*tokens[:-1], other])[-1]
    assert agree == (tokens[-1] == other)


def test_a_slot_is_told_in_words() -> None:
    tree = PrefixTree()
    nodes = tree.walk(request_from(Add(1, 1), 0), [5, 6])
    assert tree.describe(nodes[1]) == "token 6 of position 1"
    assert tree.describe(0) == "nothing (never written)"
