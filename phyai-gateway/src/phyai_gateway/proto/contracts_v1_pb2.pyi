from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ContractRequest(_message.Message):
    __slots__ = ("model_name",)
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    def __init__(self, model_name: _Optional[str] = ...) -> None: ...

class ContractResponse(_message.Message):
    __slots__ = ("contract_json",)
    CONTRACT_JSON_FIELD_NUMBER: _ClassVar[int]
    contract_json: str
    def __init__(self, contract_json: _Optional[str] = ...) -> None: ...
