"""Sessions stay with their replica as long as it is not busy."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from enginewright.route.fleet import SessionMemory
from enginewright.route.replica import Replica
from tests.helpers.fleet import Routing, routing
from tests.helpers.serving import CHAT, COMPLETIONS, Running, running, wait_until

SESSION = {"X-Session-Id": "mine"}
SHORT = {"max_tokens": 1}


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Running]]:
    with running() as first, running() as second:
        yield [first, second]


@pytest.fixture
def proxy(replicas: list[Running]) -> Iterator[Routing]:
    with routing(*(replica.port for replica in replicas), max_lead=1) as opened:
        yield opened


def moves(proxy: Routing) -> float:
    text = proxy.ask("GET", "/metrics").body.decode()
    (found,) = [line for line in text.splitlines() if line.startswith("enginewright_route_session_moves_total ")]
    return float(found.split()[1])


def ask(proxy: Routing, number: int, headers: dict[str, str], path: str = COMPLETIONS, **keys: Any) -> int:
    """Sends a prompt that shares nothing with others; returns the replica that has answered."""
    before = proxy.attempts()
    body = {"prompt": f"{number} " * 200} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    assert proxy.post(path, body | SHORT | keys, headers).status == 200
    (replica,) = [place for place, count in enumerate(proxy.attempts()) if count > before[place]]
    return replica


def test_a_session_stays_with_its_replica(proxy: Routing) -> None:
    """Without a session, prompts of equal cost go to the replica with fewer requests so far."""
    assert {ask(proxy, number, {}) for number in range(4)} == {0, 1}
    first = ask(proxy, 10, SESSION)
    assert [ask(proxy, number, SESSION) for number in range(11, 16)] == [first] * 5
    assert ask(proxy, 16, {}, session_id="mine") == ask(proxy, 0, {}, CHAT, session_id="mine") == first
    assert ask(proxy, 17, {"X-Session-Id": "other"}, session_id="mine") != first, "the header counts"
    assert ask(proxy, 18, SESSION | {"Authorization": "Bearer other"}) != first, "sessions are their tenant's"
    assert moves(proxy) == 0


def test_a_session_leaves_a_busy_replica(proxy: Routing, replicas: list[Running]) -> None:
    first = ask(proxy, 1, SESSION)
    with ThreadPoolExecutor(2) as pool, replicas[first].held_steps() as free:
        held = []
        for number in (2, 3):  # the second is one more than the other replica has, which max_lead allows
            held.append(pool.submit(proxy.post, COMPLETIONS, {"prompt": f"{number}", **SHORT}, SESSION))
            wait_until(lambda: len(proxy.fleet.replicas[first].running) == len(held))
        assert ask(proxy, 4, SESSION) == 1 - first
        assert moves(proxy) == 1
        free.set()
        assert [one.result().status for one in held] == [200, 200]
    assert moves(proxy) == 2, "the last answers came from the first replica"
    assert ask(proxy, 5, SESSION) == first


def test_memory_forgets_the_oldest_session() -> None:
    memory, replica = SessionMemory(max_sessions=2), Replica.__new__(Replica)
    for session in (b"a", b"b", b"a", b"c"):
        memory.remember(session, replica)
    memory.remember(None, replica)
    assert [memory.replica_of(session) for session in (b"a", b"b", b"c", None)] == [replica, None, replica, None]
