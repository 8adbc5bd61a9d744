"""The scheduling policy, pure: a frozen snapshot and ``now`` in, decisions with reason codes out."""

from control_plane.queue.scheduler.model import Ahead as Ahead
from control_plane.queue.scheduler.model import Decision as Decision
from control_plane.queue.scheduler.model import Evaluation as Evaluation
from control_plane.queue.scheduler.model import Placement as Placement
from control_plane.queue.scheduler.model import Preempt as Preempt
from control_plane.queue.scheduler.model import Reason as Reason
from control_plane.queue.scheduler.model import Reservation as Reservation
from control_plane.queue.scheduler.model import Running as Running
from control_plane.queue.scheduler.model import Snapshot as Snapshot
from control_plane.queue.scheduler.model import Start as Start
from control_plane.queue.scheduler.model import Wait as Wait
from control_plane.queue.scheduler.model import Waiting as Waiting
from control_plane.queue.scheduler.order import order as order
from control_plane.queue.scheduler.policy import projected_start as projected_start
from control_plane.queue.scheduler.policy import schedule as schedule
from control_plane.queue.scheduler.rules import DEFAULT as DEFAULT
from control_plane.queue.scheduler.rules import Rules as Rules
