"""Who may ask: tenants by their keys, of which only digests are kept."""

from hashlib import blake2b

from rollart.core.protocols import Generate
from rollart.core.types import CapturedEpisode
from rollart.gateway.messages import EpisodeLimits
from rollart.gateway.template import ChatTemplate
from rollart.gateway.tenant import Tenant


class Tenants:
    def __init__(self, template: ChatTemplate, generate: Generate) -> None:
        self._template, self._generate = template, generate
        self._tenants: dict[bytes, Tenant] = {}

    def open(self, key: str, terms: EpisodeLimits) -> None:
        """The key holds from now on."""
        digest = _digest(key)
        if digest in self._tenants:
            raise ValueError("this key is in use already")
        self._tenants[digest] = Tenant(terms, self._template, self._generate)

    def find(self, key: str) -> Tenant | None:
        return self._tenants.get(_digest(key))

    def close(self, key: str) -> CapturedEpisode:
        """The key is revoked. Raises KeyError if it never held."""
        return self._tenants.pop(_digest(key)).close()


def _digest(key: str) -> bytes:
    return blake2b(key.encode("utf-8", "surrogateescape"), digest_size=32).digest()
