"""Options of the model's name and of how clients reach the server."""

from __future__ import annotations

from typing import Annotated

import msgspec

from server.options.option import Option


class NetworkOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model answers, where it listens, and to whom."""

    # -- model
    model: Annotated[
        str, Option("Model: a folder, or a name on the Hugging Face hub (owner/name). Empty: the bundled model.")
    ] = ""
    served_model_name: Annotated[
        tuple[str, ...],
        Option("Names that requests may use for the model; the first is the one answers carry. Empty: from the model."),
    ] = ()

    presets: Annotated[
        str, Option("Folder with presets of your own (*.json), beside those that come with the server.")
    ] = ""

    # -- network
    host: Annotated[str, Option("Address to listen on. 0.0.0.0 and :: listen on every interface.")] = "127.0.0.1"
    port: Annotated[int, Option("TCP port to listen on; 0 takes a free one.", low=0, high=65535)] = 8000
    api_key: Annotated[
        str, Option("Key that clients must send as 'Authorization: Bearer KEY' to /v1 and /metrics. Empty: no key.")
    ] = ""
    allowed_hosts: Annotated[
        tuple[str, ...],
        Option("Further host names that clients may use for this server ('*': any). Guards against DNS rebinding."),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Option(
            "Web origins (https://example.org) whose pages may call this server ('*': any). Same origin always may."
        ),
    ] = ()
    tls_certificate: Annotated[str, Option("Certificate (PEM file, with its chain) to serve https with.")] = ""
    tls_key: Annotated[str, Option("Private key (PEM file) of --tls-certificate.")] = ""
    https_self_signed: Annotated[
        bool,
        Option(
            "Serve https with a certificate that the server makes itself: pages of other machines then get the camera, "
            "after one warning. Needs beholder[ui]."
        ),
    ] = False
    ui: Annotated[bool, Option("The web UI at /ui, where beholder[ui] is installed.")] = True
    max_body_mb: Annotated[float, Option("Largest request body.", unit="MiB", low=0.001, high=4096)] = 64
    request_timeout_s: Annotated[
        float, Option("Longest time that one request may take, waiting included.", unit="s", low=0.1, high=86_400)
    ] = 600
    grace_s: Annotated[
        float, Option("How long running requests may go on after SIGTERM.", unit="s", low=0, high=3600)
    ] = 30

    hang_timeout_s: Annotated[
        float,
        Option(
            "A process that shows no sign of life for so long is ended and restarted; above any layer of a step.",
            unit="s",
            low=3,
            high=86_400,
        ),
    ] = 120
