"""`build-engine serve`: run tritonserver on a model repository until Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from build_scripts import options, output
from plugins.support.errors import InputError, VerificationError

HttpPort = Annotated[
    int, typer.Option("--http-port", min=0, max=65535, help="HTTP: /v2, generate, generate_stream.")
]
GrpcPort = Annotated[
    int, typer.Option("--grpc-port", min=0, max=65535, help="gRPC: infer and streams.")
]
MetricsPort = Annotated[
    int, typer.Option("--metrics-port", min=0, max=65535, help="Prometheus metrics.")
]


def command(
    repo_dir: Annotated[Path, typer.Argument(metavar="REPO_DIR", help="Output of `repo`.")],
    http_port: HttpPort = 8000,
    grpc_port: GrpcPort = 8001,
    metrics_port: MetricsPort = 8002,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    log_file: Annotated[
        Path | None, typer.Option("--log-file", help="Where the server's own log goes.")
    ] = None,
    self_test: Annotated[
        bool,
        typer.Option("--self-test", help="Ask real questions before saying that it is ready."),
    ] = False,
    json: options.Json = False,
) -> None:
    """Serve a model repository with a real tritonserver; Ctrl-C stops it cleanly.

    A server that crashes is started again on the same ports, at most three times in ten minutes.

    A port given as 0 is replaced by a free one. With --json the object (addresses, process id) is
    printed as soon as the server answers.

    [bold]Examples[/bold]

      build-engine serve model_repository
      build-engine serve model_repository --self-test
      build-engine serve model_repository --http-port 0 --grpc-port 0 --metrics-port 0
    """
    from triton_repo import selftest, server
    from triton_repo.validate import validate_repository

    def ready(running: server.TritonServer) -> None:
        addresses = {
            "http": running.http_url,
            "grpc": running.grpc_url,
            "metrics": running.metrics_url,
            "pid": running.pid,
        }
        if json:
            output.emit_json(addresses)
            return
        for name, address in addresses.items():
            output.say(f"{name + ':':<9}{address}")
        output.say("ready; Ctrl-C stops the server")

    def probe(running: server.TritonServer) -> None:
        results = selftest.self_test(running.http_url, running.grpc_url)
        wrong = [f"{result.name}: {result.problem}" for result in results if result.problem]
        if wrong:
            raise VerificationError("the server gives wrong answers", found="; ".join(wrong))
        output.say(f"self-test: {len(results)} questions answered right")

    def restarting(failure: InputError) -> None:
        output.say(f"{failure.what}; starting the server again:{failure.found}")

    validate_repository(repo_dir)
    output.say(f"starting tritonserver on {repo_dir}")
    server.serve(
        repo_dir,
        host=host,
        ports=server.Ports(http_port, grpc_port, metrics_port),
        probe=probe if self_test else server.probe,
        log_file=log_file,
        on_ready=ready,
        on_restart=restarting,
    )
    output.say("stopped")
