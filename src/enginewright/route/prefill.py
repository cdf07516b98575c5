"""Prefill and decode apart: a long prompt is computed by one replica before another one answers.

The form is vLLM's: the first request has `do_remote_decode` in its `kv_transfer_params`, and the answer has those with
which the other replica fetches the prompt's KV blocks.
"""

import logging
from collections.abc import Collection
from dataclasses import replace

import httpx2
import msgspec

from enginewright.route.choice import is_computed_apart
from enginewright.route.fleet import Fleet
from enginewright.route.prefixes import NO_RAW, UNREADABLE
from enginewright.route.replica import Replica, read_whole
from enginewright.route.request import RoutedRequest
from enginewright.runtime.server.form import encode

logger = logging.getLogger(__name__)

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
# Keys of requests that no other replica can compute: one keeps the conversation, or the client routes by itself.
BOUND = ("previous_response_id", "kv_transfer_params")
ASKED = {"stream": False, "stream_options": None, "kv_transfer_params": {"do_remote_decode": True}}


class Prefilled(msgspec.Struct):
    """The answer of a replica that has computed a prompt."""

    kv_transfer_params: msgspec.Raw = NO_RAW  # parameters of the answering replica's request, as JSON


async def prefilled(fleet: Fleet, request: RoutedRequest, among: Collection[Replica]) -> RoutedRequest:
    """Lets a replica compute a prompt of which much is new to the one that would answer.

    Args:
        fleet: the replicas.
        request: the request.
        among: the replicas that may answer.

    Returns:
        The request with the parameters of the computed prompt. It is the request itself if the prompt is short, most of
        it was answered before, or no replica could compute it.
    """
    helper = fleet.choose(request.keys, fleet.prefills) if request.route in ROUTES else None
    answering = fleet.choose(request.keys, among, request.session)
    if helper is None or answering is None or request.body is None:
        return request
    if not is_computed_apart(request.keys, answering, fleet.config.min_prefill_bytes):
        return request
    try:
        body = msgspec.json.decode(request.body, type=dict[str, msgspec.Raw])
    except UNREADABLE:  # a replica says what is wrong
        return request
    if any(bytes(body.get(key, b"null")) != b"null" for key in BOUND):
        return request
    data = await _compute(helper, replace(request, body=encode(body | ASKED)))
    params = _params_of(data)
    if params is None:
        return request
    extended = encode(body | {"kv_transfer_params": params})
    if len(extended) > fleet.config.max_body_bytes:
        return request
    return replace(request, body=extended, original=request)


async def _compute(replica: Replica, request: RoutedRequest) -> bytes:
    """Sends a request to a replica that computes its prompt; the answer's body, which is empty after a failure."""
    outcome, data, matched = "gone", b"", replica.prefixes.match(request.keys)
    try:
        async with replica.attempt(request.to(replica)) as response:
            outcome = str(response.status_code)
            data = await read_whole(response)
    except (httpx2.TransportError, httpx2.InvalidURL, TimeoutError) as error:
        outcome = replica.failed(error)
    finally:
        replica.outcomes[outcome] += 1
    if outcome != "200":
        logger.warning("replica %s has not computed a prompt: %s", replica.name, outcome)
        return b""
    replica.answered(request.keys, matched)
    return data


def _params_of(data: bytes) -> msgspec.Raw | None:
    """The parameters in an answer; None if it has none, since the prompt has no full block."""
    try:
        params = msgspec.json.decode(data, type=Prefilled).kv_transfer_params if data else NO_RAW
    except UNREADABLE:
        return None
    return params if bytes(params).startswith(b"{") else None
