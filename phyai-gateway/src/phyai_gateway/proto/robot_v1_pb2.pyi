from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RobotState(_message.Message):
    __slots__ = ("joint_angles", "joint_velocities", "x", "y", "z", "roll", "pitch", "yaw")
    JOINT_ANGLES_FIELD_NUMBER: _ClassVar[int]
    JOINT_VELOCITIES_FIELD_NUMBER: _ClassVar[int]
    X_FIELD_NUMBER: _ClassVar[int]
    Y_FIELD_NUMBER: _ClassVar[int]
    Z_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    PITCH_FIELD_NUMBER: _ClassVar[int]
    YAW_FIELD_NUMBER: _ClassVar[int]
    joint_angles: _containers.RepeatedScalarFieldContainer[float]
    joint_velocities: _containers.RepeatedScalarFieldContainer[float]
    x: float
    y: float
    z: float
    roll: float
    pitch: float
    yaw: float
    def __init__(self, joint_angles: _Optional[_Iterable[float]] = ..., joint_velocities: _Optional[_Iterable[float]] = ..., x: _Optional[float] = ..., y: _Optional[float] = ..., z: _Optional[float] = ..., roll: _Optional[float] = ..., pitch: _Optional[float] = ..., yaw: _Optional[float] = ...) -> None: ...

class SensorData(_message.Message):
    __slots__ = ("image_rgb", "image_depth", "timestamp_ns", "state", "language_instruction")
    IMAGE_RGB_FIELD_NUMBER: _ClassVar[int]
    IMAGE_DEPTH_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_NS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LANGUAGE_INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    image_rgb: bytes
    image_depth: bytes
    timestamp_ns: int
    state: RobotState
    language_instruction: str
    def __init__(self, image_rgb: _Optional[bytes] = ..., image_depth: _Optional[bytes] = ..., timestamp_ns: _Optional[int] = ..., state: _Optional[_Union[RobotState, _Mapping]] = ..., language_instruction: _Optional[str] = ...) -> None: ...

class ActionCmd(_message.Message):
    __slots__ = ("target_joint_angles", "target_joint_velocities", "gripper_opening", "timestamp_ns", "inference_time")
    TARGET_JOINT_ANGLES_FIELD_NUMBER: _ClassVar[int]
    TARGET_JOINT_VELOCITIES_FIELD_NUMBER: _ClassVar[int]
    GRIPPER_OPENING_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_NS_FIELD_NUMBER: _ClassVar[int]
    INFERENCE_TIME_FIELD_NUMBER: _ClassVar[int]
    target_joint_angles: _containers.RepeatedScalarFieldContainer[float]
    target_joint_velocities: _containers.RepeatedScalarFieldContainer[float]
    gripper_opening: float
    timestamp_ns: int
    inference_time: int
    def __init__(self, target_joint_angles: _Optional[_Iterable[float]] = ..., target_joint_velocities: _Optional[_Iterable[float]] = ..., gripper_opening: _Optional[float] = ..., timestamp_ns: _Optional[int] = ..., inference_time: _Optional[int] = ...) -> None: ...
