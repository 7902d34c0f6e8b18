"""Each scene goes as it says; the instrument `mutants.simulated` shows which rules it holds."""

from __future__ import annotations

import pytest

from simulation import kafka_scenes, postgres_scenes, scene, search_scenes
from simulation.explorer import quiet

FAMILIES = {"kafka": kafka_scenes, "postgres": postgres_scenes, "elasticsearch": search_scenes}
EACH = [(letters, one) for family in FAMILIES for letters, one in scene.SCENES[family]]


@pytest.mark.parametrize(("letters", "one"), EACH, ids=[f"{letters} {one.__name__}" for letters, one in EACH])
def test_a_scene_goes_as_it_says(letters: str, one: scene.Scene) -> None:
    with quiet():
        assert scene.play(letters, one) == ""
