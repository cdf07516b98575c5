"""Entries that servers share in an object store with S3's protocol: Amazon S3, MinIO, Ceph, R2, SeaweedFS, ….

It takes three requests, HEAD, GET and PUT of an object, each signed by Signature Version 4:
https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
"""

import hmac
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from urllib.parse import parse_qsl, urlsplit

from enginewright.errors import EngineError, UsageError
from enginewright.runtime import env
from enginewright.runtime.cache.remote import StoreError

CONNECTIONS = 16  # requests at a time
TIMEOUTS = {"connect": 2.0, "read": 5.0, "write": 5.0, "pool": 30.0}  # seconds without progress
MAX_REQUEST_S = 30.0  # maximum seconds of a request
MAX_ERROR_BYTES = 64 << 10  # size of an error's body that is read
FORM = "s3://BUCKET/PREFIX?endpoint=https://HOST:PORT&region=REGION"
BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
PREFIX = re.compile(r"[A-Za-z0-9._/-]*")  # characters that a URL, and a signature, leave as they are
REGION = re.compile(r"[a-z0-9-]+")
CODE = re.compile(rb"<Code>(\w+)</Code>")
RIGHTS = "It takes s3:GetObject, s3:PutObject and s3:ListBucket, without which missing objects are refused, too."


@dataclass(frozen=True)
class S3Location:
    """A folder of a bucket."""

    bucket: str  # its name
    prefix: str  # name of the folder, with a slash at its end; empty: the bucket itself
    endpoint: str  # origin of the server, such as https://s3.us-east-1.amazonaws.com
    region: str  # region for which requests are signed

    @classmethod
    def of_url(cls, url: str) -> "S3Location":
        """Reads a URL in the form FORM, whose query may be left out.

        Raises:
            UsageError: it has another form.
        """
        try:
            parts = urlsplit(url)
            query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
            region = query.pop("region", env.aws_region())
            endpoint = query.pop("endpoint", env.aws_endpoint() or f"https://s3.{region}.amazonaws.com")
            server = urlsplit(endpoint)
            is_right = (
                BUCKET.fullmatch(parts.netloc) is not None
                and PREFIX.fullmatch(parts.path) is not None
                and not any(part in (".", "..") for part in parts.path.split("/"))
                and REGION.fullmatch(region) is not None
                and server.scheme in ("http", "https")
                and bool(server.hostname)
                and (server.port or 1) > 0
                and server.path in ("", "/")
                and not (query or parts.fragment or server.query or server.fragment or server.username)
            )
        except ValueError:
            is_right = False
        if not is_right:
            why = f"it must be {FORM}, whose query may be left out"
            raise UsageError(f"kv_cache_remote is {url}", why)
        prefix = parts.path.strip("/")
        return cls(parts.netloc, f"{prefix}/" if prefix else "", f"{server.scheme}://{server.netloc}", region)


@dataclass(frozen=True)
class Credentials:
    """A key of an account."""

    key_id: str  # its name
    secret: str  # the key itself
    token: str | None = None  # the session that it belongs to; None: it is a permanent one

    @classmethod
    def of_environment(cls) -> "Credentials":
        """Reads the environment variables of all S3 clients.

        Raises:
            UsageError: they are not set.
        """
        key_id, secret, token = env.aws_credentials()
        if not key_id or not secret:
            raise UsageError(
                "kv_cache_remote has no credentials for s3://",
                "AWS_ACCESS_KEY_ID or AWS_SECRET_ACCESS_KEY is not set",
                "Set both, and AWS_SESSION_TOKEN for a key of a session.",
            )
        return cls(key_id, secret, token)


def signed_headers(
    method: str,
    host: str,
    path: str,
    credentials: Credentials,
    region: str,
    now: datetime,
    content: bytes = b"",
    extra: Mapping[str, str] = {},
) -> dict[str, str]:
    """Headers of a request without a query, signed by Signature Version 4.

    Args:
        method: the HTTP method.
        host: the Host header.
        path: the path, in characters that need no encoding.
        credentials: who signs.
        region: region of the bucket.
        now: time of the signature, in UTC.
        content: the body.
        extra: further headers to sign, by names in lower case.
    """
    at, digest = now.strftime("%Y%m%dT%H%M%SZ"), sha256(content).hexdigest()
    headers = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": at, **extra}
    if credentials.token is not None:
        headers["x-amz-security-token"] = credentials.token
    lines, names = [f"{name}:{headers[name]}" for name in sorted(headers)], ";".join(sorted(headers))
    request = "\n".join([method, path, "", *lines, "", names, digest])
    scope = f"{at[:8]}/{region}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", at, scope, sha256(request.encode()).hexdigest()])
    key = f"AWS4{credentials.secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), sha256)
    signature = hmac.digest(key, text.encode(), sha256).hex()
    who = f"AWS4-HMAC-SHA256 Credential={credentials.key_id}/{scope}"
    return {**headers, "authorization": f"{who}, SignedHeaders={names}, Signature={signature}"}


class S3Blobs:
    """Contents in a bucket, each an object.

    Args:
        location: the bucket, and a folder in it.
        folder: name of a further folder below it.
        credentials: who signs.
        max_bytes: maximum size of a content.

    Raises:
        EngineError: httpx2 is not installed.
    """

    def __init__(self, location: S3Location, folder: str, credentials: Credentials, max_bytes: int) -> None:
        try:
            import httpx2
        except ImportError as error:
            raise EngineError(
                "kv_cache_remote s3:// cannot be used",
                "httpx2 is not installed",
                "pip install 'enginewright[kv-store]'",
            ) from error
        self._http, self._location, self._credentials = httpx2, location, credentials
        self._host = httpx2.URL(location.endpoint).netloc.decode()
        self._folder, self._max_bytes = f"/{location.bucket}/{location.prefix}{folder}", max_bytes
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=CONNECTIONS, keepalive_expiry=30.0)
        # A transport has no cookies, follows no redirects and uses no proxy, unlike a client.
        self._transport = httpx2.HTTPTransport(limits=limits, trust_env=False)
        self._threads = ThreadPoolExecutor(CONNECTIONS, "kv-s3")

    def find(self, names: Sequence[bytes]) -> Sequence[bool]:
        """Says for each name if there is a content."""
        return list(self._threads.map(lambda name: self._request("HEAD", name) is not None, names))

    def get(self, names: Sequence[bytes]) -> Iterator[bytes | None]:
        """Reads the content of each name; None if there is none."""
        return self._threads.map(lambda name: self._request("GET", name), names)

    def put(self, name: bytes, content: bytes) -> None:
        """Writes a content."""
        self._request("PUT", name, content)

    def close(self) -> None:
        """Ends connections and threads."""
        self._threads.shutdown(cancel_futures=True)
        self._transport.close()

    def _request(self, method: str, name: bytes, content: bytes = b"") -> bytes | None:
        """Sends a request; returns the body of its answer, or None if there is no such object."""
        path, until = f"{self._folder}/{name.hex()}", time.monotonic() + MAX_REQUEST_S
        headers = signed_headers(
            method, self._host, path, self._credentials, self._location.region, datetime.now(UTC), content
        )
        request = self._http.Request(
            method,
            f"{self._location.endpoint}{path}",
            headers=headers,
            content=content or None,
            extensions={"timeout": TIMEOUTS},
        )
        try:
            response = self._transport.handle_request(request)
            try:
                body, limit = bytearray(), self._max_bytes if response.status_code == 200 else MAX_ERROR_BYTES
                for piece in response.iter_raw():
                    body += piece
                    if len(body) > limit:
                        break
                    if time.monotonic() > until:
                        raise TimeoutError(f"a request took more than {MAX_REQUEST_S:.0f} s")
            finally:
                response.close()
        except (self._http.TransportError, OSError) as error:
            raise StoreError(
                "unreachable",
                f"{self._where} cannot be reached",
                str(error) or type(error).__name__,
                "See if the server runs, and if endpoint is its address.",
            ) from error
        if response.status_code == 404 and method != "PUT":
            return None
        if response.status_code != 200:
            raise self._failure(response.status_code, bytes(body))
        return bytes(body)

    @property
    def _where(self) -> str:
        return f"kv_cache_remote s3://{self._location.bucket} at {self._location.endpoint}"

    def _failure(self, status: int, body: bytes) -> StoreError:
        """The error of an answer."""
        code = CODE.search(body)
        why = f"status {status}" + (f", {code[1].decode()}" if code else "")
        if status in (301, 307, 400):
            return StoreError("refused", f"{self._where} refuses requests", why, "Name the bucket's region: ?region=….")
        if status in (401, 403):
            return StoreError("refused", f"{self._where} refuses requests", why, f"See the key's rights. {RIGHTS}")
        if status == 404:
            return StoreError("failed", f"{self._where} does not exist", why, "Create the bucket.")
        return StoreError("failed", f"{self._where} has failed", why)
