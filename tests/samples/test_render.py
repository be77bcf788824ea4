"""Pictures show what the numbers say."""

import random

import numpy as np
import torch

from samples.training.names import Noun
from samples.training.pack import Pack
from samples.training.render import Renderer, plan
from samples.training.world import Background, Catalogue, Item, Picture, shape_sprites

WHITE = Background((0.0, *(1.0,) * 6, *(0.0,) * 7), "white", (1.0, 1.0, 1.0))


def test_a_shape_is_where_and_how_it_was_put(pack: Pack) -> None:
    renderer = Renderer(np.concatenate((pack.sprites, shape_sprites())))
    square = Item(Noun("square"), Catalogue(pack).first_shape + 1, tint=(1.0, 0.0, 0.0), x=0.25, y=0.75, size=0.3)
    drawn = renderer.draw(plan([Picture(WHITE, (square,)), Picture(WHITE)]), 256, 256, grain=False)
    assert torch.allclose(drawn[0, :, 192, 64], torch.tensor([1.0, 0.0, 0.0]), atol=0.02)
    assert torch.allclose(drawn[0, :, 64, 192], torch.ones(3))
    assert torch.allclose(drawn[1], torch.ones(3, 256, 256))


def test_later_things_cover_earlier_ones(pack: Pack) -> None:
    renderer = Renderer(np.concatenate((pack.sprites, shape_sprites())))
    first = Catalogue(pack).first_shape + 1
    items = [Item(Noun("square"), first, tint=tint, size=0.6) for tint in ((1.0, 0.0, 0.0), (0.0, 0.0, 1.0))]
    drawn = renderer.draw(plan([Picture(WHITE, tuple(items))]), 64, 64, grain=False)
    assert drawn[0, 2, 32, 32] > 0.95
    assert drawn[0, 0, 32, 32] < 0.05


def test_drawing_is_the_same_each_time_without_grain(pack: Pack) -> None:
    renderer = Renderer(np.concatenate((pack.sprites, shape_sprites())))
    item = Catalogue(pack).thing(random.Random(0))
    twice = [renderer.draw(plan([Picture(WHITE, (item,))]), 128, 96, grain=False) for _ in range(2)]
    assert twice[0].shape == (1, 3, 128, 96)
    assert torch.equal(*twice)
