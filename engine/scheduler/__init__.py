"""The scheduling policy, pure: a frozen snapshot and ``now`` in, decisions with reason codes out."""

from engine.scheduler.model import Ahead as Ahead
from engine.scheduler.model import Decision as Decision
from engine.scheduler.model import Evaluation as Evaluation
from engine.scheduler.model import Placement as Placement
from engine.scheduler.model import Preempt as Preempt
from engine.scheduler.model import Reason as Reason
from engine.scheduler.model import Reservation as Reservation
from engine.scheduler.model import Running as Running
from engine.scheduler.model import Snapshot as Snapshot
from engine.scheduler.model import Start as Start
from engine.scheduler.model import Wait as Wait
from engine.scheduler.model import Waiting as Waiting
from engine.scheduler.order import order as order
from engine.scheduler.policy import projected_start as projected_start
from engine.scheduler.policy import schedule as schedule
from engine.scheduler.rules import DEFAULT as DEFAULT
from engine.scheduler.rules import Rules as Rules
