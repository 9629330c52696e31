"""Where images may be fetched from, as a value. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from ecomp.compute_conf import ComputeConfig
from ecomp.model.image_sources import ImageSources, image_sources


@dataclass(frozen=True)
class Reach:
    """Where images may be fetched from. `sources` None means any address that is nowhere refused.

    `control` is host and port of etcd and of placement, from which no image is fetched. `proxy` is the URL of an HTTP
    proxy, None for none: it resolves names itself, so of a name only its text is checked.
    """

    sources: ImageSources | None = None
    proxy: str | None = None
    control: tuple[tuple[str, int], ...] = ()


def reach_of(config: ComputeConfig) -> Reach:
    """The Reach that compute.yaml describes."""
    named = [urlsplit(f'//{each}') for each in config.etcd.endpoints] + [urlsplit(config.placement.endpoint)]
    control = tuple((each.hostname or '', port_of(each)) for each in named)
    sources = None if config.image_sources is None else image_sources(config.image_sources)
    return Reach(sources, config.image_proxy, control)


def port_of(parts: SplitResult) -> int:
    """The port that a URL names, or the one of its scheme."""
    return parts.port or (443 if parts.scheme == 'https' else 80)
