"""Messages generated from the ``.proto`` files here, and the codec of the native protocol.

The generated files are checked in, made by a generator of protobuf 6.31, because generated code may
not be newer than the installed protobuf. To make them again, from the package's ``src`` folder::

    python -m venv /tmp/protoc && /tmp/protoc/bin/pip install grpcio-tools==1.74.0
    /tmp/protoc/bin/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. \\
        phyai_gateway/proto/*.proto
"""
