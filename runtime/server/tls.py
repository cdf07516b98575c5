"""TLS of the server: a certificate and its key from files, which are read again on SIGHUP."""

import logging
import ssl
from pathlib import Path

from enginewright.errors import UsageError
from enginewright.regular_file import SMALL_FILE_BYTES, read_regular

logger = logging.getLogger(__name__)

FIX = "Give the PEM files of a certificate, with the chain behind it, and of its key."


class Tls:
    """The certificate that connections are answered with.

    Args:
        certfile: PEM: the certificate, and behind it those that lead to its authority.
        keyfile: PEM: its private key, without a password; None: it is in certfile.

    Raises:
        UsageError: a file cannot be read or holds something else, or the key belongs to another certificate.
    """

    def __init__(self, certfile: str | Path, keyfile: str | Path | None) -> None:
        self._certfile, self._keyfile = certfile, keyfile
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._load(self.context)

    def reload(self) -> None:
        """Read the files again: for new connections, and only if they are right."""
        try:
            self._load(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))
            self._load(self.context)
        except UsageError as error:
            logger.error("the certificate stays as it was: %s", error)
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
    """OpenSSL would ask for one on the terminal."""
    raise UsageError(
        "the TLS key has a password",
        "nobody could type it when a server starts by itself",
        "Remove it (openssl pkey -in KEY -out NEW), and let nobody else read the file.",
    )
