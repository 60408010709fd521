"""What clients of the gateway are held to."""

from msgspec import Struct


class GatewayLimits(Struct, frozen=True):
    """Seconds for a request to come, for an answer, for a client to take a piece of it, and for one to say nothing."""

    body_bytes: int = 32 << 20
    requests: int = 4096
    read_s: float = 30.0
    answer_s: float = 600.0
    send_s: float = 60.0
    idle_s: float = 75.0
