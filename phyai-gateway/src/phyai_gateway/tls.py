"""TLS of listeners: certificate files, read again when they change."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. client_ca: clients must show a certificate of this authority (mTLS)."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def server_context(self) -> ssl.SSLContext:
        """Return a context for asyncio and WebSocket servers; raises OSError, ssl.SSLError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.cert, self.key)
        if self.client_ca is not None:
            context.load_verify_locations(self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def reload(self, context: ssl.SSLContext) -> None:
        """Give new handshakes of the context the files' present certificate.

        Raises OSError, ssl.SSLError with the context as it was.
        """
        self.server_context()  # loading half a pair would leave the context without its key
        context.load_cert_chain(self.cert, self.key)

    def grpc_credentials(self) -> Any:
        """Return gRPC server credentials that follow the files, a signal is not needed; raises
        OSError."""
        import grpc

        seen = self._stamp()
        refused: tuple[int, ...] = ()

        def configuration() -> Any:
            ca = self.client_ca.read_bytes() if self.client_ca else None
            pairs = [(self.key.read_bytes(), self.cert.read_bytes())]
            return grpc.ssl_server_certificate_configuration(pairs, ca)

        def fetch() -> Any:
            """Return what new handshakes use; None = gRPC keeps the configuration it has."""
            nonlocal seen, refused
            now = self._stamp()
            if not now or now in (seen, refused):
                return None
            try:
                self.server_context()  # half a pair would end every handshake
                made = configuration()
            except OSError as error:  # ssl.SSLError is one
                refused = now
                log.error("TLS files were not taken: %s", type(error).__name__)
                return None
            seen = now
            return made

        return grpc.dynamic_ssl_server_credentials(
            configuration(), fetch, require_client_authentication=self.client_ca is not None
        )

    def _stamp(self) -> tuple[int, ...]:
        """Return what changes with the files; empty while one of them is missing."""
        files = [self.cert, self.key, *([self.client_ca] if self.client_ca else [])]
        try:
            return tuple(file.stat().st_mtime_ns for file in files)
        except FileNotFoundError:
            return ()
