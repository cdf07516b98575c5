"""A request router ranks replicas by what they have computed and what they run."""

from enginewright.ray.known import Hints, KnownReplicas
from enginewright.route.prefixes import read_body

FIRST, SECOND = (read_body(b'{"prompt": "%s"}' % (word * 200)).keys(b"") for word in (b"first ", b"second "))


def test_a_prompt_returns_to_its_replica() -> None:
    known = KnownReplicas(max_lead=8)
    known.takes("a", FIRST)
    known.takes("b", SECOND)
    assert known.ranks(Hints(FIRST), ["b", "a"]) == [["a"], ["b"]]
    assert known.ranks(Hints(SECOND), ["a", "b"]) == [["b"], ["a"]]


def test_a_busy_replica_loses_its_prefix() -> None:
    known = KnownReplicas(max_lead=2)
    known.takes("a", FIRST)
    for _ in range(2):
        known.begun("a")
    assert known.ranks(Hints(FIRST), ["a", "b"])[0] == ["a"]
    known.begun("a")
    assert known.ranks(Hints(FIRST), ["a", "b"]) == [["b"], ["a"]]
    known.ended("a")
    assert known.ranks(Hints(FIRST), ["a", "b"])[0] == ["a"]


def test_new_prompts_are_spread() -> None:
    known = KnownReplicas(max_lead=8)
    assert known.ranks(Hints(), ["a", "b"])[0] == ["a"]
    known.begun("a")
    assert known.ranks(Hints(), ["a", "b"])[0] == ["b"]
    known.ended("a")
    assert known.ranks(Hints(), ["a", "b"])[0] == ["b"]  # fewer requests have ended there


def test_a_replica_that_could_not_answer_is_the_last() -> None:
    known = KnownReplicas(max_lead=8)
    known.takes("a", FIRST)
    assert known.ranks(Hints(FIRST, avoid=["a"]), ["a", "b", "c"]) == [["b"], ["a", "c"]]
    assert known.ranks(Hints(FIRST, avoid=["a"]), ["a"]) == [["a"]]
    assert known.ranks(Hints(avoid=["a", "b"]), ["a", "b"]) == [["a", "b"]]


def test_the_keeper_of_a_response_comes_first_as_long_as_it_runs() -> None:
    known = KnownReplicas(max_lead=0)
    known.begun("b")
    assert known.ranks(Hints(replica="b"), ["a", "b"]) == [["b"], ["a"]]
    assert known.ranks(Hints(replica="b"), ["a", "c"])[0] == ["a"]


def test_a_replica_that_has_ended_is_forgotten() -> None:
    known = KnownReplicas(max_lead=8)
    known.takes("b", FIRST)
    known.keep({"a"})
    assert known.ranks(Hints(FIRST), ["a", "b"])[0] == ["a"]


def test_an_end_without_a_beginning_counts_nothing() -> None:
    known = KnownReplicas(max_lead=0)
    known.ended("a")
    known.begun("a")
    assert known.ranks(Hints(), ["a", "b"])[0] == ["b"]
