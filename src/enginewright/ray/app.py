"""The Ray Serve application: an ingress, and the replicas."""

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from enginewright.ray.ingress import Ingress
from enginewright.ray.replica import Replica
from enginewright.ray.router import PrefixRouter
from enginewright.ray.scaling import scale_by_queues
from enginewright.ray.settings import Settings

MAX_INGRESS_REQUESTS = 4096  # requests at once in an ingress
METRICS_S = 2.0  # seconds between two reports of a replica's metrics
HEALTH_S = 2.0  # seconds between two health checks
SURGE_PERCENT = 50  # replicas that are started in advance, in a rolling update


def build(arguments: Mapping[str, Any]) -> Application:
    """Builds the application; a builder for `serve run` and for config files of Ray Serve.

    Args:
        arguments: names and values of settings (Settings.of).

    Raises:
        UsageError: a name is unknown, or a value is not valid.
    """
    return application(Settings.of(arguments))


def application(settings: Settings) -> Application:
    """Builds the application of these settings."""
    drain_s = settings.server.drain_seconds
    replicas = serve.deployment(
        Replica,
        name="Replica",
        **_number_of_replicas(settings),
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        max_ongoing_requests=settings.max_ongoing,
        max_queued_requests=settings.server.max_num_waiting,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, request_router_kwargs={"max_lead": settings.max_lead}
        ),
        graceful_shutdown_timeout_s=drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_S,
        max_surge_percent=SURGE_PERCENT,
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=settings.ingresses,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MAX_INGRESS_REQUESTS,
        graceful_shutdown_timeout_s=drain_s,
        max_surge_percent=100,
    )
    return ingress.bind(replicas.bind(settings), settings)


def _number_of_replicas(settings: Settings) -> dict[str, Any]:
    if settings.max_replicas is None:
        return {"num_replicas": settings.replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=settings.replicas,
            max_replicas=settings.max_replicas,
            target_ongoing_requests=settings.target,
            metrics_interval_s=METRICS_S,
            look_back_period_s=5 * METRICS_S,
            upscale_delay_s=settings.upscale_delay_s,
            downscale_delay_s=settings.downscale_delay_s,
            policy=AutoscalingPolicy(policy_function=scale_by_queues),
        )
    }
