from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_UINT8: _ClassVar[DataType]
    DATA_TYPE_INT32: _ClassVar[DataType]
    DATA_TYPE_INT64: _ClassVar[DataType]
    DATA_TYPE_FLOAT16: _ClassVar[DataType]
    DATA_TYPE_BFLOAT16: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]
    DATA_TYPE_FLOAT64: _ClassVar[DataType]
    DATA_TYPE_BOOL: _ClassVar[DataType]

class ImageEncoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IMAGE_ENCODING_UNSPECIFIED: _ClassVar[ImageEncoding]
    IMAGE_ENCODING_RAW: _ClassVar[ImageEncoding]
    IMAGE_ENCODING_JPEG: _ClassVar[ImageEncoding]
    IMAGE_ENCODING_PNG: _ClassVar[ImageEncoding]

class ImageLayout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IMAGE_LAYOUT_UNSPECIFIED: _ClassVar[ImageLayout]
    IMAGE_LAYOUT_HWC: _ClassVar[ImageLayout]
    IMAGE_LAYOUT_CHW: _ClassVar[ImageLayout]
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_UINT8: DataType
DATA_TYPE_INT32: DataType
DATA_TYPE_INT64: DataType
DATA_TYPE_FLOAT16: DataType
DATA_TYPE_BFLOAT16: DataType
DATA_TYPE_FLOAT32: DataType
DATA_TYPE_FLOAT64: DataType
DATA_TYPE_BOOL: DataType
IMAGE_ENCODING_UNSPECIFIED: ImageEncoding
IMAGE_ENCODING_RAW: ImageEncoding
IMAGE_ENCODING_JPEG: ImageEncoding
IMAGE_ENCODING_PNG: ImageEncoding
IMAGE_LAYOUT_UNSPECIFIED: ImageLayout
IMAGE_LAYOUT_HWC: ImageLayout
IMAGE_LAYOUT_CHW: ImageLayout

class Tensor(_message.Message):
    __slots__ = ("data", "shape", "dtype")
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: DataType
    def __init__(self, data: _Optional[bytes] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[_Union[DataType, str]] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("name", "data", "shape", "dtype", "encoding", "layout")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    data: bytes
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: DataType
    encoding: ImageEncoding
    layout: ImageLayout
    def __init__(self, name: _Optional[str] = ..., data: _Optional[bytes] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[_Union[DataType, str]] = ..., encoding: _Optional[_Union[ImageEncoding, str]] = ..., layout: _Optional[_Union[ImageLayout, str]] = ...) -> None: ...

class InferenceRequest(_message.Message):
    __slots__ = ("request_id", "timestamp_ns", "images", "robot_state", "instruction", "requested_action_horizon", "extensions_json", "model_name", "inputs")
    class InputsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_NS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    ROBOT_STATE_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_ACTION_HORIZON_FIELD_NUMBER: _ClassVar[int]
    EXTENSIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    timestamp_ns: int
    images: _containers.RepeatedCompositeFieldContainer[Image]
    robot_state: Tensor
    instruction: str
    requested_action_horizon: int
    extensions_json: str
    model_name: str
    inputs: _containers.MessageMap[str, Tensor]
    def __init__(self, request_id: _Optional[str] = ..., timestamp_ns: _Optional[int] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ..., robot_state: _Optional[_Union[Tensor, _Mapping]] = ..., instruction: _Optional[str] = ..., requested_action_horizon: _Optional[int] = ..., extensions_json: _Optional[str] = ..., model_name: _Optional[str] = ..., inputs: _Optional[_Mapping[str, Tensor]] = ...) -> None: ...

class InferenceResponse(_message.Message):
    __slots__ = ("request_id", "actions", "inference_time_us", "extensions_json", "outputs")
    class OutputsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    INFERENCE_TIME_US_FIELD_NUMBER: _ClassVar[int]
    EXTENSIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    actions: Tensor
    inference_time_us: int
    extensions_json: str
    outputs: _containers.MessageMap[str, Tensor]
    def __init__(self, request_id: _Optional[str] = ..., actions: _Optional[_Union[Tensor, _Mapping]] = ..., inference_time_us: _Optional[int] = ..., extensions_json: _Optional[str] = ..., outputs: _Optional[_Mapping[str, Tensor]] = ...) -> None: ...

class HealthRequest(_message.Message):
    __slots__ = ("model_name",)
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    def __init__(self, model_name: _Optional[str] = ...) -> None: ...

class HealthResponse(_message.Message):
    __slots__ = ("healthy",)
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    healthy: bool
    def __init__(self, healthy: bool = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("endpoint", "model_name")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    model_name: str
    def __init__(self, endpoint: _Optional[str] = ..., model_name: _Optional[str] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("accepted", "server_id", "heartbeat_interval_seconds", "message")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    server_id: str
    heartbeat_interval_seconds: int
    message: str
    def __init__(self, accepted: bool = ..., server_id: _Optional[str] = ..., heartbeat_interval_seconds: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("server_id",)
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    def __init__(self, server_id: _Optional[str] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("registered", "message")
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    registered: bool
    message: str
    def __init__(self, registered: bool = ..., message: _Optional[str] = ...) -> None: ...
