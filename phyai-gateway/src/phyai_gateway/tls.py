"""TLS of listeners: certificate files, read again when they change."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
        """Give new handshakes of the context the files' present certificate."""
        context.load_cert_chain(self.cert, self.key)

    def grpc_credentials(self) -> Any:
        """Return gRPC server credentials that follow the files; raises OSError."""
        import grpc

        seen = self._stamp()

        def configuration() -> Any:
            ca = self.client_ca.read_bytes() if self.client_ca else None
            pairs = [(self.key.read_bytes(), self.cert.read_bytes())]
            return grpc.ssl_server_certificate_configuration(pairs, ca)

        def fetch() -> Any:
            nonlocal seen
            now = self._stamp()
            if now == seen:
                return None  # gRPC keeps the configuration it has
            seen = now
            return configuration()

        return grpc.dynamic_ssl_server_credentials(
            configuration(), fetch, require_client_authentication=self.client_ca is not None
        )

    def _stamp(self) -> tuple[int, ...]:
        files = [self.cert, self.key, *([self.client_ca] if self.client_ca else [])]
        return tuple(file.stat().st_mtime_ns for file in files)
