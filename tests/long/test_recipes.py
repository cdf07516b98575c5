"""Recipes that tests/cli/test_recipes.py leaves out."""

from tests.cli import test_recipes as short
from tests.helpers.breadth import repeated

test_a_recipes_kv_cache_gives_way_to_latent_vectors = repeated(
    short.test_a_recipes_kv_cache_gives_way_to_latent_vectors, "name", short.WITH_INT8_KV[1:]
)
