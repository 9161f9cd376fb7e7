"""Every message that crosses a socket, and one typed decoder a receiving end.

Owns: the wire format (docs/PROTOCOL.md describes it; golden-bytes tests pin it). Never does: open a socket.
Messages are MessagePack arrays whose first element is the tag. New fields go last, with defaults. Bulk arrays travel as
a second frame beside a header (`StepInput`, `StepResult`, `EmbedInput`, `EmbedResult`); `procengine.step_payload`
cuts those frames into named sections.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from procengine.messages.base import PROTOCOL_VERSION
from procengine.messages.clients import (
    Abort,
    Attach,
    Attached,
    Delta,
    Embedding,
    GetStats,
    Hello,
    Lost,
    Outputs,
    Received,
    Rejected,
    RequestTimes,
    Stats,
    Submit,
    TokenLogprobs,
    Welcome,
)
from procengine.messages.control import (
    AdapterChanged,
    Adapters,
    ChangeAdapter,
    ChildStats,
    Drain,
    Drained,
    Ended,
    EndGroup,
    Failed,
    FrontendLost,
    GetStatus,
    Leave,
    LoadLora,
    LoraChanged,
    OutputLost,
    ProcessStatus,
    Query,
    Ready,
    RecordedRequests,
    RecordWritten,
    Restart,
    Restarted,
    RetireWorker,
    Shutdown,
    Status,
    Stays,
    TakeRecord,
    UnloadLora,
    WorkerHung,
    WorkerLost,
    WorkerRetired,
    WriteRecord,
)
from procengine.messages.output import (
    Admitted,
    ClientGone,
    Delivered,
    Finish,
    Register,
    Replay,
    Resume,
    Resync,
    TextStop,
)
from procengine.messages.steps import (
    AdapterLoaded,
    Begin,
    EmbedInput,
    EmbedResult,
    LoadAdapter,
    StepFailed,
    StepInput,
    StepResult,
    WorkerReady,
)

__all__ = [
    "PROTOCOL_VERSION",
    "UNREADABLE",
    "Abort",
    "AdapterChanged",
    "AdapterLoaded",
    "Adapters",
    "Admitted",
    "Attach",
    "Attached",
    "Begin",
    "ChangeAdapter",
    "ChildStats",
    "ClientGone",
    "Delivered",
    "Delta",
    "Drain",
    "Drained",
    "EmbedInput",
    "EmbedResult",
    "Embedding",
    "EndGroup",
    "Ended",
    "Failed",
    "Finish",
    "FromAsker",
    "FromChild",
    "FromFrontend",
    "FromSupervisor",
    "FrontendLost",
    "GetStats",
    "GetStatus",
    "Hello",
    "Leave",
    "LoadAdapter",
    "LoadLora",
    "LoraChanged",
    "Lost",
    "OutputLost",
    "Outputs",
    "ProcessStatus",
    "Query",
    "Ready",
    "Received",
    "RecordWritten",
    "RecordedRequests",
    "Register",
    "Rejected",
    "Replay",
    "RequestTimes",
    "Restart",
    "Restarted",
    "Resume",
    "Resync",
    "RetireWorker",
    "Shutdown",
    "Stats",
    "Status",
    "Stays",
    "StepFailed",
    "StepInput",
    "StepResult",
    "Submit",
    "TakeRecord",
    "TextStop",
    "TokenLogprobs",
    "UnloadLora",
    "Welcome",
    "WorkerHung",
    "WorkerLost",
    "WorkerReady",
    "WorkerRetired",
    "WriteRecord",
    "decode_ended",
    "decode_from_client",
    "decode_from_control_peer",
    "decode_from_frontend",
    "decode_from_output",
    "decode_from_output_peer",
    "decode_from_supervisor",
    "decode_from_worker",
    "decode_lora_changed",
    "decode_record_written",
    "decode_restarted",
    "decode_status",
    "decode_step",
    "decode_to_client",
    "encode",
]

encode = msgspec.msgpack.Encoder().encode

# What a decoder raises for bytes that are no message of its union; the second is for those that nest too deep.
UNREADABLE = (msgspec.DecodeError, RecursionError)

FromClient = Hello | Submit | Abort | GetStats
ToClient = Welcome | Received | Rejected | Stats | Attached | Lost | Outputs
FromFrontend = Register | Admitted | Finish | Replay | Resume
FromOutput = TextStop | ClientGone | Resync | Delivered
Step = StepInput | EmbedInput
ToWorker = Begin | LoadAdapter | Step
FromWorker = WorkerReady | AdapterLoaded | StepFailed | StepResult | EmbedResult
ToFrontend = WorkerLost | OutputLost | RetireWorker | TakeRecord | ChangeAdapter
FromSupervisor = Query | Drain | FrontendLost | Leave | Shutdown | Adapters | ToFrontend
FromChild = (
    Ready | Failed | ChildStats | Drained | WorkerHung | WorkerRetired | Stays | RecordedRequests | AdapterChanged
)
FromAsker = GetStatus | Restart | EndGroup | WriteRecord | LoadLora | UnloadLora
FromControlPeer = FromChild | FromAsker


decode_from_client: Callable[[bytes], FromClient] = msgspec.msgpack.Decoder(FromClient).decode
decode_from_output_peer: Callable[[bytes], Attach] = msgspec.msgpack.Decoder(Attach).decode
decode_to_client: Callable[[bytes], ToClient] = msgspec.msgpack.Decoder(ToClient).decode
decode_from_frontend: Callable[[bytes], FromFrontend] = msgspec.msgpack.Decoder(FromFrontend).decode
decode_from_output: Callable[[bytes], FromOutput] = msgspec.msgpack.Decoder(FromOutput).decode
decode_step: Callable[[bytes], ToWorker] = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker: Callable[[bytes], FromWorker] = msgspec.msgpack.Decoder(FromWorker).decode
decode_from_supervisor: Callable[[bytes], FromSupervisor] = msgspec.msgpack.Decoder(FromSupervisor).decode
decode_from_control_peer: Callable[[bytes], FromControlPeer] = msgspec.msgpack.Decoder(FromControlPeer).decode
decode_lora_changed: Callable[[bytes], LoraChanged] = msgspec.msgpack.Decoder(LoraChanged).decode
decode_record_written: Callable[[bytes], RecordWritten] = msgspec.msgpack.Decoder(RecordWritten).decode
decode_restarted: Callable[[bytes], Restarted] = msgspec.msgpack.Decoder(Restarted).decode
decode_ended: Callable[[bytes], Ended] = msgspec.msgpack.Decoder(Ended).decode
decode_status: Callable[[bytes], Status] = msgspec.msgpack.Decoder(Status).decode
