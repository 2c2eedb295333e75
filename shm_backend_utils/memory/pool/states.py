"""The states of a slot, and their consequences: this table alone decides whether a slot may be used again.

========  =============================================================================================================
free      No process writes there. A request may go out; the pool may hand it out again.
sent      A request went out, and its answer is not here: a model executes it, or may begin to. It is to be reclaimed
          before anything else, whatever call has it.
spoiled   Its region is never used again, and goes when it is given back.
========  =============================================================================================================

A slot that is handed out stays free until a request goes out, and is free again with the answer: the pool alone knows
the call that has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

__all__ = ["AFTER", "FREE", "SENT", "SPOILED", "Event", "State"]

State = Literal["free", "sent", "spoiled"]
Event = Literal["request", "answer", "reclaim", "refusal", "unfenced", "lost"]

FREE: Final = "free"
SENT: Final = "sent"
SPOILED: Final = "spoiled"

AFTER: Final[Mapping[Event, Mapping[State, State]]] = {
    "request": {FREE: SENT, SPOILED: SPOILED},
    # The model has completed the slot. An error of the server's is no such answer: the slot is reclaimed.
    "answer": {SENT: FREE, SPOILED: SPOILED},
    # No model holds the lease, and the generation was raised: a late request is refused.
    "reclaim": {SENT: FREE, SPOILED: SPOILED},
    # A model, or the server, cannot open the region.
    "refusal": {FREE: SPOILED, SENT: SPOILED, SPOILED: SPOILED},
    # A request that names no slot got no answer: no generation keeps its writer out.
    "unfenced": {FREE: SPOILED, SENT: SPOILED, SPOILED: SPOILED},
    # A model died while its GPU was at work there, or memory on a GPU was made by half.
    "lost": {FREE: SPOILED, SENT: SPOILED, SPOILED: SPOILED},
}
"""The state after an event, by the state before; what is not here cannot happen."""
