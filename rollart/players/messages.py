"""What players and the controller send each other. Only what decides something crosses to the controller: no context,
no observation, and an answer's length in place of its tokens.

Messages of a player leave in lists, one for each turn of its event loop, and so do replies. A message with a `number`
and no other purpose is about the request that asked for a route under this number.
"""

from msgspec import Raw, Struct

from rollart.core.packed import PackedTrajectory
from rollart.core.types import Outcome
from rollart.rollout.requests import RouteNeed, ServedRequest
from rollart.rollout.routing_policy import Why
from rollart.rollout.trajectory import RolloutTask


class PlayedAttempt(Struct, frozen=True, array_like=True):
    """An attempt as a player gets it; `task` without what only the scheduler needs."""

    id: str
    task: RolloutTask
    group: str
    member: int
    seed: int
    version: int
    held_out: bool
    peers: int


class PlayResult(Struct, frozen=True, array_like=True):
    """`ended` is the event of its end: it is logged if the trajectory arrived, so log and ledger agree."""

    trajectory: PackedTrajectory
    ended: Raw


class Cancellation(Struct, frozen=True, array_like=True):
    id: str
    verdict: Outcome
    reason: str


class _Message(Struct, frozen=True, array_like=True, tag=True, gc=False): ...


class RouteAsked(_Message, frozen=True):
    number: int
    need: RouteNeed


class KeyAsked(_Message, frozen=True):
    """For the key of the engine at `url`, to which there was a route."""

    number: int
    url: str


class RouteServed(_Message, frozen=True):
    number: int
    served: ServedRequest


class RouteFailed(_Message, frozen=True):
    number: int
    reason: str
    lost: bool


class RouteDropped(_Message, frozen=True):
    """The request was cancelled."""

    number: int


class RoutePrefilled(_Message, frozen=True):
    """Its engine for prefill has the context, or failed for this reason."""

    number: int
    reason: str = ""
    lost: bool = False


class SessionOver(_Message, frozen=True):
    session: str


class VersionSampled(_Message, frozen=True):
    """The oldest version so far that sampled a token of the attempt."""

    id: str
    version: int


class EpisodeOver(_Message, frozen=True):
    """The reward is computed once there is a reply."""

    number: int
    id: str


class EventsEmitted(_Message, frozen=True):
    events: list[Raw]


class EnvironmentsInUse(_Message, frozen=True):
    count: int


PlayerMessage = (
    RouteAsked
    | KeyAsked
    | RouteServed
    | RouteFailed
    | RouteDropped
    | RoutePrefilled
    | SessionOver
    | VersionSampled
    | EpisodeOver
    | EventsEmitted
    | EnvironmentsInUse
)


class Route(_Message, frozen=True):
    """Where a request goes; it is prefilled at `prefill_url` first, if there is one."""

    number: int
    engine: str
    url: str
    pool: str
    why: Why
    predicted_s: float
    prefilled_by: str = ""
    prefill_url: str = ""


class NoEngineYet(_Message, frozen=True):
    """No engine can take the request now: the route follows when one can."""

    number: int


class Refused(_Message, frozen=True):
    """No engine ever will."""

    number: int
    reason: str


class Confirmed(_Message, frozen=True):
    number: int
    value: str = ""


Reply = Route | NoEngineYet | Refused | Confirmed
