"""Whether a model can fetch sealed memory of this process. It is tried, once for each model."""

from __future__ import annotations

from typing import Final

from ...errors import CallerError, MachineError, StaleRequestError
from ...memory.access import Access
from ...memory.kinds import RegionKind
from ...memory.pool.slot import SlotRegion
from ...protocol.layout import PAGE_SIZE
from ...protocol.refusals import NOT_OPENED, code_in
from ..errors import InferenceError
from ..explanation import Check
from ..known_model import KnownModel
from ..options import RequestOptions
from ..settings import left_until
from ..steps import Send, SendForStream, Steps
from ..transports.messages import Codec
from .call import is_answer

__all__ = ["NAME", "try_sealed"]

NAME: Final = "sealed memory?"
_NEVER_BEGUN: Final = 1


def try_sealed(codec: Codec, model: KnownModel, access: Access, deadline: float) -> Steps[Check]:
    """Have a model that declares the direct path open sealed memory, and return what came of it.

    The request names a slot in which none was ever begun. So a model that has opened the memory refuses it as stale,
    before ``model.py`` sees it. The outcome is None if it has said nothing of the memory: then only a call can tell.
    """
    try:
        region = SlotRegion(PAGE_SIZE, 1, PAGE_SIZE, access, kind=RegionKind.SEALED)
    except MachineError as error:
        return Check(NAME, False, str(error), (), is_passing=True)
    try:
        spec = model.spec
        slot = region.slots[0].address_pattern % spec.name, _NEVER_BEGUN
        if spec.sequences:  # a trial would wait for the end of another sequence, which may be this client's
            return Check(NAME, None, "the model takes sequences, so that only a call can tell", ())
        options = RequestOptions(model_version=model.version)
        message = codec.infer(spec.name, options, batch_size=1 if spec.max_batch_size else None, slot=slot)
        timeout_s = left_until(deadline)
        yield SendForStream(message, timeout_s) if spec.is_decoupled else Send(message, timeout_s)
    except InferenceError as error:
        if not is_answer(error):
            raise
        return _judged(error)
    except CallerError as error:  # over HTTP, which has no streams
        return Check(NAME, None, str(error), ())
    finally:
        region.destroy()
    return Check(NAME, None, "the model has answered, and said nothing of it; a call will tell", ())


def _judged(error: InferenceError) -> Check:
    code = code_in(error.message())
    if code == StaleRequestError.code:
        return Check(NAME, True, "the model has fetched some by a socket; it cannot be truncated, nor left behind", ())
    if code in NOT_OPENED:
        return Check(NAME, False, f"the model could not fetch it: {error.message()}", ())
    return Check(NAME, None, f"only a call can tell whether the model can fetch it: {error.message()}", ())
