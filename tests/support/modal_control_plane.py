"""A control plane for the Modal client, on this machine. It keeps what `modal deploy`, `modal run`
and `modal app` send, and runs nothing.

It speaks the private protocol of the pinned version of the client, as far as these commands need
it. Every other call gets an empty answer, and is kept too.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import grpclib.server
from google.protobuf.json_format import MessageToDict
from grpclib import GRPCError, Status
from modal_proto import api_grpc, api_pb2

PINNED = "1.6.4"
BUILDER = "2025.06"
ROOT = Path(__file__).parents[2]


class ControlPlane:
    """Answers at `url` while it is entered. `calls` has the received messages, as dictionaries, by
    the name of the call. `functions`, `images` and `mounts` are the objects that were made;
    `inputs` are the arguments of called Functions, which return `result`. Secrets in `missing` do
    not exist. `urls` are functions' URLs that differ from the default ones. `apps` are apps that
    were deployed before, with their numbers of containers."""

    def __init__(self) -> None:
        self.calls: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.functions: dict[str, dict[str, Any]] = {}
        self.images: dict[str, dict[str, Any]] = {}
        self.mounts: dict[str, list[str]] = {}
        self.inputs: list[Any] = []
        self.result: Any = None
        self.apps: dict[str, int] = {}
        self.urls: dict[str, str] = {}
        self.missing: set[str] = set()
        self.url = ""
        self._numbers = itertools.count(1)
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ControlPlane:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        self._thread.join()

    def modal(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs `modal` against it, in the project's folder."""
        return self.python("-m", "modal", *arguments, **environment)

    def environment(self) -> dict[str, str]:
        """Returns the variables by which a process finds it."""
        return os.environ | {
            "MODAL_SERVER_URL": self.url,
            "MODAL_TOKEN_ID": "ak-test",
            "MODAL_TOKEN_SECRET": "as-test",
            "MODAL_CONFIG_PATH": "/dev/null",
            "PYTHONPATH": str(ROOT),
        }

    def python(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env=self.environment() | environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._server = grpclib.server.Server([_Handlers(self)])
        await self._server.start("127.0.0.1", 0)
        (socket,) = self._server._server.sockets  # pyright: ignore
        self.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        self._started.set()
        await self._server.wait_closed()

    def url_of(self, function: str) -> str:
        return self.urls.get(function, f"https://test--{function.lower()}.modal.example")

    def _id(self, prefix: str) -> str:
        return f"{prefix}-{next(self._numbers)}"

    # Calls that need more than an empty answer. An object is named by its request.

    def answer_AppCreate(self, _: Any) -> Any:
        return api_pb2.AppCreateResponse(app_id=self._id("ap"))

    def answer_EnvironmentGetOrCreate(self, _: Any) -> Any:
        settings = api_pb2.EnvironmentSettings(image_builder_version=BUILDER)
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    def answer_SecretGetOrCreate(self, request: Any) -> Any:
        name = request.deployment_name
        if name in self.missing:
            raise GRPCError(Status.NOT_FOUND, f"Secret '{name}' not found in environment 'main'")
        return api_pb2.SecretGetOrCreateResponse(secret_id=f"st-{name or next(self._numbers)}")

    def answer_VolumeGetOrCreate(self, request: Any) -> Any:
        id = f"vo-{request.deployment_name}"
        metadata = api_pb2.VolumeMetadata(version=request.version, name=request.deployment_name)
        return api_pb2.VolumeGetOrCreateResponse(volume_id=id, metadata=metadata)

    def answer_DictGetOrCreate(self, request: Any) -> Any:
        return api_pb2.DictGetOrCreateResponse(dict_id=f"di-{request.deployment_name}")

    def answer_MountGetOrCreate(self, request: Any) -> Any:
        id = self._id("mo")
        self.mounts[id] = [file.filename for file in request.files]
        return api_pb2.MountGetOrCreateResponse(mount_id=id)

    def answer_MountPutFile(self, _: Any) -> Any:
        return api_pb2.MountPutFileResponse(exists=True)

    def answer_ImageGetOrCreate(self, request: Any) -> Any:
        id = self._id("im")
        self.images[id] = _dictionary(request.image)
        done = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
        metadata = api_pb2.ImageMetadata(image_builder_version=BUILDER)
        return api_pb2.ImageGetOrCreateResponse(image_id=id, result=done, metadata=metadata)

    def answer_FunctionPrecreate(self, request: Any) -> Any:
        id = self._id("fu")
        metadata = api_pb2.FunctionHandleMetadata(
            function_name=request.function_name, function_type=request.function_type
        )
        return api_pb2.FunctionPrecreateResponse(function_id=id, handle_metadata=metadata)

    def answer_FunctionCreate(self, request: Any) -> Any:
        data = request.function_data
        if not data.ranked_functions:
            data.ranked_functions.add(function=request.function)
        kept = _dictionary(data)
        (ranked,) = kept.pop("ranked_functions")
        name = data.function_name or request.function.function_name
        self.functions[name] = kept | ranked["function"]
        metadata = api_pb2.FunctionHandleMetadata(
            function_name=name, function_type=data.function_type or request.function.function_type
        )
        if "http_config" in self.functions[name]:
            metadata._experimental_flash_urls.append(self.url_of(name))
        elif "webhook_config" in self.functions[name]:
            metadata.web_url = self.url_of(name)
        return api_pb2.FunctionCreateResponse(
            function_id=request.existing_function_id or self._id("fu"),
            function=request.function,
            function_data=data,
            handle_metadata=metadata,
        )

    def answer_ClassCreate(self, _: Any) -> Any:
        return api_pb2.ClassCreateResponse(class_id=self._id("cs"))

    def answer_AppPublish(self, _: Any) -> Any:
        return api_pb2.AppPublishResponse(url="https://modal.example/app")

    def answer_FunctionGet(self, request: Any) -> Any:
        name = request.object_tag
        metadata = api_pb2.FunctionHandleMetadata(function_name=name)
        if name[0].isupper():  # a class, so a Server
            metadata._experimental_flash_urls.append(self.url_of(name))
        elif name == "api":
            metadata.web_url = self.url_of(name)
        data = api_pb2.FunctionData(function_name=name)
        data.ranked_functions.add(function=api_pb2.Function(function_name=name))
        return api_pb2.FunctionGetResponse(
            function_id=f"fu-{name}", handle_metadata=metadata, function=data
        )

    def answer_AppList(self, _: Any) -> Any:
        apps = [
            api_pb2.AppListResponse.AppListItem(
                app_id=f"ap-{name}",
                description=name,
                state=api_pb2.APP_STATE_DEPLOYED,
                n_running_tasks=count,
            )
            for name, count in self.apps.items()
        ]
        return api_pb2.AppListResponse(apps=apps)

    def answer_AppGetByDeploymentName(self, request: Any) -> Any:
        app = f"ap-{request.name}" if request.name in self.apps else ""
        return api_pb2.AppGetByDeploymentNameResponse(app_id=app, environment_name="main")

    def answer_FunctionBindParams(self, _: Any) -> Any:
        return api_pb2.FunctionBindParamsResponse(bound_function_id=self._id("fu"))

    def answer_FunctionMap(self, request: Any) -> Any:
        (item,) = request.pipelined_inputs
        self.inputs.append(pickle.loads(item.input.args))
        put = api_pb2.FunctionPutInputsResponseItem(idx=item.idx, input_id=self._id("in"))
        return api_pb2.FunctionMapResponse(function_call_id=self._id("fc"), pipelined_inputs=[put])

    def answer_FunctionGetOutputs(self, _: Any) -> Any:
        done = api_pb2.GenericResult(
            status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS, data=pickle.dumps(self.result)
        )
        output = api_pb2.FunctionGetOutputsItem(
            result=done, data_format=api_pb2.DATA_FORMAT_PICKLE, input_id="in-1"
        )
        return api_pb2.FunctionGetOutputsResponse(outputs=[output], num_unfinished_inputs=0)

    def answer_AppGetLogs(self, _: Any) -> Any:
        return api_pb2.TaskLogsBatch(app_done=True)


def _dictionary(message: Any) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True)


class _Handlers:
    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    def __mapping__(self) -> dict[str, Any]:
        base = api_grpc.ModalClientBase.__mapping__(self)  # pyright: ignore
        return {
            path: handler._replace(func=self._handler(path.rpartition("/")[2], handler))
            for path, handler in base.items()
        }

    def __getattr__(self, name: str) -> Any:
        """What the base class would look up as the handler of a call."""
        return None

    def _handler(self, name: str, handler: Any) -> Any:
        async def answer(stream: Any) -> None:
            request = await stream.recv_message()
            self._plane.calls[name].append(_dictionary(request))
            make = getattr(self._plane, f"answer_{name}", None)
            if make is not None:
                await stream.send_message(make(request))
            elif not handler.cardinality.server_streaming:
                await stream.send_message(handler.reply_type())

        return answer
