"""TLS of the server: reads a certificate and its key from files, and again on SIGHUP."""

import logging
import ssl
from pathlib import Path

from enginewright.errors import UsageError
from enginewright.regular_file import SMALL_FILE_BYTES, read_regular

logger = logging.getLogger(__name__)

FIX = "Give the PEM files of a certificate, followed by its chain, and of its key."


class Tls:
    """The server's certificate.

    Args:
        certfile: PEM file of the certificate, followed by those that lead to its authority.
        keyfile: PEM file of the private key, without a password; None means that it is in certfile.

    Raises:
        UsageError: a file cannot be read or has another content, or the key belongs to another certificate.
    """

    def __init__(self, certfile: str | Path, keyfile: str | Path | None) -> None:
        self._certfile, self._keyfile = certfile, keyfile
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._load(self.context)

    def reload(self) -> None:
        """Reads the files again, for new connections, if they are valid."""
        try:
            self._load(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))
            self._load(self.context)
        except UsageError as error:
            logger.error("the certificate was not replaced: %s", error)
        else:
            logger.info("the certificate was read again from %s", self._certfile)

    def _load(self, context: ssl.SSLContext) -> None:
        for path in [self._certfile, *([self._keyfile] if self._keyfile is not None else [])]:
            try:
                read_regular(path, SMALL_FILE_BYTES)
            except OSError as error:
                raise UsageError(f"{path} cannot be read", (error.strerror or str(error)).lower(), FIX) from error
        try:
            context.load_cert_chain(self._certfile, self._keyfile, _no_password)
        except ssl.SSLError as error:
            key = self._keyfile or self._certfile
            if error.reason == "KEY_VALUES_MISMATCH":
                raise UsageError(f"{key} is not the key of {self._certfile}", "they do not match", FIX) from error
            reason = (error.reason or "no PEM").replace("_", " ").lower()
            raise UsageError(f"{self._certfile} and {key} are no certificate and key", reason, FIX) from error


def _no_password() -> str:
    """Refuses a key with a password, which OpenSSL would ask for on the terminal."""
    raise UsageError(
        "the TLS key has a password",
        "nobody could type it when a server starts by itself",
        "Remove it (openssl pkey -in KEY -out NEW), and let nobody else read the file.",
    )
