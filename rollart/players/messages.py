"""What players and the controller send each other. Only what decides something crosses to the controller: no context,
no observation, and an answer's length in place of its tokens. A trajectory crosses once, packed.

Replies have the `number` of the question. A route is known by the number under which it was asked for.
"""

from msgspec import Struct

from rollart.core.events import AnyEvent
from rollart.core.packed import PackedTrajectory
from rollart.core.types import Outcome
from rollart.rollout.requests import RouteNeed, ServedRequest
from rollart.rollout.routing_policy import Why
from rollart.rollout.trajectory import RolloutTask


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


class EventEmitted(_Message, frozen=True):
    event: AnyEvent


class EnvironmentsInUse(_Message, frozen=True):
    """Sent every few seconds: it shows that the player is alive."""

    count: int


class Played(_Message, frozen=True):
    """The result of an attempt, with the event of its end: that is logged if the trajectory arrived, so log and ledger
    agree."""

    trajectory: PackedTrajectory
    ended: AnyEvent


class PlayCrashed(_Message, frozen=True):
    """A bug of ours, which must end the run."""

    id: str
    error: str


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
    | EventEmitted
    | EnvironmentsInUse
    | Played
    | PlayCrashed
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


class AttemptToPlay(_Message, frozen=True):
    """`task` without what only the scheduler needs."""

    id: str
    task: RolloutTask
    group: str
    member: int
    seed: int
    version: int
    held_out: bool
    peers: int


class AttemptCancelled(_Message, frozen=True):
    id: str
    verdict: Outcome
    reason: str


ControllerMessage = Route | NoEngineYet | Refused | Confirmed | AttemptToPlay | AttemptCancelled
