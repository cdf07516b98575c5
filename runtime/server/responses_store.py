"""Keeps responses for GET /v1/responses/{id} and previous_response_id, and has the routes that show them."""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.form import encode
from enginewright.runtime.server.keys import not_implemented

DEFAULT_PAGE, MAX_PAGE = 20, 100  # items on a page


@dataclass(frozen=True)
class StoredResponse:
    """A response and the conversation before it."""

    response: bytes  # response as JSON
    items: bytes  # items of the conversation before the response's output, as JSON


class ResponseStore:
    """The most recently used responses, within two limits; tenants do not see each other's.

    Args:
        max_count: the maximum number of responses; 0 keeps none.
        max_bytes: the maximum size of all responses with the conversations before them, in bytes.
    """

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.max_count, self._max_bytes = max_count, max_bytes
        self._kept: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def put(self, tenant: str, id: str, stored: StoredResponse) -> None:
        """Stores a response, and removes the least recently used ones beyond the limits."""
        self._kept[tenant, id] = stored
        self.num_bytes += _size(stored)
        while len(self._kept) > self.max_count or self.num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.num_bytes -= _size(oldest)

    def get(self, tenant: str, id: str) -> StoredResponse | None:
        """Finds a response; None if it is not kept."""
        stored = self._kept.get((tenant, id))
        if stored is not None:
            self._kept.move_to_end((tenant, id))
        return stored

    def conversation(self, tenant: str, id: str) -> list[dict[str, Any]] | None:
        """All items up to the end of a response; None if it is not kept."""
        stored = self.get(tenant, id)
        if stored is None:
            return None
        return [*msgspec.json.decode(stored.items), *msgspec.json.decode(stored.response)["output"]]

    def delete(self, tenant: str, id: str) -> None:
        """Removes a response."""
        self.num_bytes -= _size(self._kept.pop((tenant, id)))


def _size(stored: StoredResponse) -> int:
    return len(stored.response) + len(stored.items)


class StoredRoutes:
    """Routes that show and delete kept responses."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    @property
    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/v1/responses/{id}", self._retrieve, methods=["GET"]),
            Route("/v1/responses/{id}", self._delete, methods=["DELETE"]),
            Route("/v1/responses/{id}/input_items", self._input_items, methods=["GET"]),
        ]

    async def _retrieve(self, request: Request) -> Response:
        _check_query(request, ())
        return _json(self._found(request).response)

    async def _delete(self, request: Request) -> Response:
        _check_query(request, ())
        self._found(request)
        id = request.path_params["id"]
        self._store.delete(request.scope["tenant"], id)
        return _json(encode({"id": id, "object": "response", "deleted": True}))

    async def _input_items(self, request: Request) -> Response:
        """Items before a response, the last one first unless the query has another order."""
        _check_query(request, ("after", "limit", "order"))
        items = msgspec.json.decode(self._found(request).items)
        query = request.query_params
        order, limit, after = query.get("order", "desc"), query.get("limit", str(DEFAULT_PAGE)), query.get("after")
        if order not in ("asc", "desc"):
            raise ApiError(400, 'order must be "asc" or "desc"', param="order", code="invalid_value")
        if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MAX_PAGE):
            raise ApiError(400, f"limit must be between 1 and {MAX_PAGE}", param="limit", code="invalid_value")
        if order == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise ApiError(400, "after is the id of no item of this response", param="after", code="invalid_value")
        first = 0 if after is None else ids.index(after) + 1
        page = items[first : first + int(limit)]
        more = first + len(page) < len(items)
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return _json(encode({"object": "list", "data": page, **ends, "has_more": more}))

    def _found(self, request: Request) -> StoredResponse:
        id = request.path_params["id"]
        stored = self._store.get(request.scope["tenant"], id)
        if stored is None:
            raise ApiError(404, f"there is no response {id[:100]!r}, or it is no longer kept", code="not_found")
        return stored


def _check_query(request: Request, known: Collection[str]) -> None:
    for name in request.query_params:
        if name not in known:
            raise not_implemented(name[:100])


def _json(data: bytes) -> Response:
    return Response(data, media_type="application/json")
