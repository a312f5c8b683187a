"""The committed code is what proto/ says, and the method table is what the services say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.message import Message

from kvstored_client.proto import admin_pb2, kvstore_pb2, methods
from kvstored_client.proto.methods import Kind, Method, Raw

PROTO = Path(__file__).parents[2] / "proto" / "kvstored" / "v1"
MODULES = {"kvstore.proto": kvstore_pb2, "admin.proto": admin_pb2}


@pytest.fixture(scope="module")
def compiled(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, descriptor_pb2.FileDescriptorProto]:
    """What the installed compiler makes of proto/, by file name."""
    out = tmp_path_factory.mktemp("proto") / "set.bin"
    command = [sys.executable, "-W", "ignore", "-m", "grpc_tools.protoc", f"-I{PROTO}"]
    files = sorted(str(path) for path in PROTO.glob("*.proto"))
    subprocess.run([*command, f"--descriptor_set_out={out}", *files], check=True, timeout=60)
    found = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    return {file.name: file for file in found.file}


def without_json_names(
    file: descriptor_pb2.FileDescriptorProto,
) -> descriptor_pb2.FileDescriptorProto:
    """Compilers differ in whether they write the JSON names that follow from the field names."""
    copy = descriptor_pb2.FileDescriptorProto.FromString(file.SerializeToString())

    def clear(message: descriptor_pb2.DescriptorProto) -> None:
        for field in message.field:
            field.ClearField("json_name")
        for inner in message.nested_type:
            clear(inner)

    for message in copy.message_type:
        clear(message)
    return copy


@pytest.mark.parametrize("name", MODULES)
def test_generated_code_is_fresh(
    name: str, compiled: dict[str, descriptor_pb2.FileDescriptorProto]
) -> None:
    committed = descriptor_pb2.FileDescriptorProto()
    MODULES[name].DESCRIPTOR.CopyToProto(committed)
    assert without_json_names(committed) == without_json_names(compiled[name]), "run `make proto`"


@pytest.mark.parametrize("name", MODULES)
def test_type_stubs_name_every_message_and_field(
    name: str, compiled: dict[str, descriptor_pb2.FileDescriptorProto]
) -> None:
    module = MODULES[name]
    assert module.__file__ is not None
    stub = Path(module.__file__).with_suffix(".pyi").read_text()
    for message in compiled[name].message_type:
        assert f"class {message.name}(" in stub
        for field in message.field:
            assert f"{field.name}:" in stub
    for enum in compiled[name].enum_type:
        for value in enum.value:
            assert f"{value.name}:" in stub


def test_every_proto_file_has_its_module(
    compiled: dict[str, descriptor_pb2.FileDescriptorProto],
) -> None:
    assert set(compiled) == set(MODULES)


def declared(module: ModuleType) -> dict[str, Method]:
    """The method table as the service descriptors have it."""
    table = {}
    for service in module.DESCRIPTOR.services_by_name.values():
        for rpc in service.methods:
            raw_in = rpc.input_type.name == "RawFrames"
            raw_out = rpc.output_type.name == "RawFrames"
            kind = {
                (False, False): Kind.UNARY_UNARY,
                (False, True): Kind.UNARY_STREAM,
                (True, True): Kind.STREAM_STREAM,
            }[rpc.client_streaming, rpc.server_streaming]
            method = Method(
                service.full_name,
                rpc.name,
                kind,
                methods.RAW if raw_in else rpc.input_type._concrete_class,
                methods.RAW if raw_out else rpc.output_type._concrete_class,
            )
            table[method.path] = method
    return table


def test_the_method_table_is_the_services() -> None:
    ours = {method.path: method for method in methods.METHODS}
    assert len(ours) == len(methods.METHODS)
    assert ours == {**declared(kvstore_pb2), **declared(admin_pb2)}
    assert methods.GET.path == "/kvstored.v1.KVStore/Get"


def test_serializers_fit_their_sides() -> None:
    for method in methods.METHODS:
        for side, there, back in (
            (method.request, method.request_serializer, method.request_deserializer),
            (method.reply, method.reply_serializer, method.reply_deserializer),
        ):
            if isinstance(side, Raw):
                assert there is None
                assert back is None
                continue
            assert there is not None
            assert back is not None
            empty: Message = side()
            assert back(there(empty)) == empty


def test_states_of_the_client_are_those_of_the_wire() -> None:
    from kvstored_client import ChunkState, PutState

    ours = {state.name: int(state) for state in ChunkState}
    theirs = dict(kvstore_pb2.ChunkState.items())
    assert ours == {
        name.replace("STATE_UNSPECIFIED", "UNSPECIFIED"): n for name, n in theirs.items()
    }
    puts = {name.removeprefix("PUT_"): n for name, n in kvstore_pb2.PutState.items()}
    del puts["WANTED"]
    assert {state.name: int(state) for state in PutState} == puts
