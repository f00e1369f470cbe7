"""Spec strings of codecs, and the errors about invalid spec strings."""

import pytest
import torch
from cases import for_each
from every_codec import SPECS

from fedcomp import available_codecs, codec
from fedcomp.codecs import LayerWise
from fedcomp.codecs.identity import Half
from fedcomp.codecs.product import Product
from fedcomp.codecs.randomk import RandomK
from fedcomp.codecs.stc import STC
from fedcomp.codecs.threshold import Threshold
from fedcomp.codecs.topk import TopK
from fedcomp.config import RunConfig
from fedcomp.errors import ConfigError, SpecError


@for_each("spec", SPECS)
def test_str_of_a_codec_is_its_spec_string(spec):
    c = codec(spec)
    assert codec(str(c)) == c and hash(codec(str(c))) == hash(c)
    assert isinstance(c, LayerWise) == spec.endswith("@layer") == str(c).endswith("@layer")
    assert all(available_codecs()[name] for name in c.name.split("+")) and c.source
    assert "+" in c.name or available_codecs()[c.name].id == c.id


@for_each(
    "spec, built",
    [
        ("stc", STC(1 / 100)),
        ("stc:1%", STC(0.01)),
        ("stc:density=1/400@model", STC(1 / 400)),
        ("topk", TopK(0.01, "fp32")),
        (" topk : density = 2e-3 , values = fp16 ", TopK(0.002, "fp16")),
        ("topk:density=100%@layer", LayerWise(TopK(1.0))),
        ("randomk:5%", RandomK(0.05, "uniform", False, "fp32")),
        ("randomk:density=5%,by=magnitude,scaled=yes", RandomK(0.05, "magnitude", True)),
        ("threshold:0.5", Threshold(0.5, "tau")),
        ("threshold:tau=1e-3,values=fp16@layer", LayerWise(Threshold(0.001, "fp16"))),
        ("topk:density=1%+fp16", Product(TopK(0.01), Half())),
        (" threshold : tau = 1/2 + fp16 @model", Product(Threshold(0.5), Half())),
        ("stc:density=2%+fp16@layer", LayerWise(Product(STC(0.02), Half()))),
    ],
)
def test_a_spec_string_builds_a_codec_with_its_options(spec, built):
    assert codec(spec) == built


@for_each("option", ["uplink", "downlink"])
def test_a_name_without_options_has_the_default_options_of_a_run(option):
    text = getattr(RunConfig(), option)
    assert codec(text.partition(":")[0]) == codec(text)


@for_each(
    "spec, sentence",
    [
        ("sct", "unknown codec 'sct'; did you mean 'stc'"),
        ("top-k", "unknown codec 'top-k'; did you mean 'topk'"),
        ("", "incomplete"),
        ("stc:denisty=1%", "no option 'denisty'; did you mean 'density'"),
        ("topk:vlaues=fp16", "no option 'vlaues'; did you mean 'values'"),
        ("topk:values=fp17", "cannot be 'fp17'; did you mean 'fp16'"),
        ("identity:density=1%", "no option 'density'; it takes no options"),
        (
            "stc:density=0",
            "density must be in (0, 1]; try density=1%",
        ),
        ("stc:density=-1%", "density must be in (0, 1]; try density=1%"),
        ("sbc:density=1.0001", "density must be in (0, 1]; try density=1%"),
        ("topk:density=101%", "density must be in (0, 1]; try density=1%"),
        ("topk:density=1e-400", "density must be in (0, 1]; try density=1%"),
        ("stc:density=nan", "cannot be 'nan'; give a number such as"),
        ("stc:density=1/0", "cannot be '1/0'; give a number such as"),
        ("stc:density=0@layer", "density must be in (0, 1]; try density=1%"),
        ("stc@layers", "scope 'layers'; write @model, @layer or @chunk=4096"),
        ("stc@", "write @model, @layer or @chunk=4096"),
        ("stc@chunk", "@chunk has no size; write @chunk=4096"),
        ("stc@chunk=", "@chunk has no size; write @chunk=4096"),
        ("stc@chunk=0", "@chunk is 0; give a number of coordinates, such as 4096"),
        ("stc@chunk=4k", "@chunk cannot be '4k'; give a whole number"),
        ("stc@layer=2", "scope 'layer=2'; write @model, @layer or @chunk=4096"),
        (
            "randomk:density=0",
            "density must be in (0, 1]; try density=1%",
        ),
        ("randomk:by=size", "by cannot be 'size'"),
        (
            "randomk:scaled=maybe",
            "scaled cannot be 'maybe'; give true or false",
        ),
        (
            "threshold:tau=0",
            "tau is 0; give a number above 0 in the range of float32, such as 0.01",
        ),
        ("threshold:tau=1%,values=bf16", "values cannot be 'bf16'"),
        ("topk:density=1%+nonsense@layer", "unknown codec 'nonsense'"),
        (
            "topk:density=1%+fp16:density=1%",
            "codec 'fp16' has no option 'density'; it takes no options",
        ),
        ("topk:density=2+fp16", "density must be in (0, 1]; try density=1%"),
        ("topk+", "'topk+' is incomplete"),
        ("+fp16", "'+fp16' is incomplete"),
        ("topk+fp16@layers", "scope 'layers'; write @model, @layer or @chunk=4096"),
        ("topk@layer+fp16", "scope 'layer+fp16'; write @model, @layer or @chunk=4096"),
        (
            "topk+fp16+identity",
            "'topk+fp16+identity' has 3 parts; give at most two: a codec that selects coordinates, and a codec for their values",
        ),
        (
            "fp16+topk",
            "a product starts with a codec that selects coordinates, but 'fp16' does not; give topk+fp16",
        ),
        (
            "fp16+identity",
            "a product starts with a codec that selects coordinates, but 'fp16' does not; give topk:density=1%+identity",
        ),
        (
            "topk+stc",
            "the second codec of a product encodes the selected values, but 'stc' selects coordinates again; give another codec, such as",
        ),
        ("topk+powersgd", "'powersgd' needs matrices; give another codec, such as topk+fp16"),
    ],
)
def test_an_invalid_spec_is_refused_in_one_sentence_with_the_fix(spec, sentence):
    with pytest.raises(SpecError) as caught:
        codec(spec)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_available_codecs_returns_a_copy():
    available_codecs().clear()
    assert "stc" in available_codecs()


@for_each("given", [None, 3, b"stc"])
def test_a_spec_must_be_a_string(given):
    with pytest.raises(SpecError, match="specified by a string"):
        codec(given)


@for_each(
    "x",
    [[1.0, 2.0], torch.ones(3).numpy(), torch.ones(3).to_sparse(), torch.empty(3, device="meta")],
)
def test_only_dense_tensors_are_encoded(x):
    with pytest.raises(ConfigError, match="dense torch tensor"):
        codec("stc").encode(x)


@for_each(
    "x",
    [
        [[1.0]],
        torch.ones(1, 3).numpy(),
        torch.ones(1, 3).to_sparse(),
        torch.empty(1, 3, device="meta"),
    ],
)
def test_only_dense_stacks_are_encoded(x):
    with pytest.raises(ConfigError, match="dense torch tensor"):
        codec("stc").encode_batch(x, [0])


@for_each("numel", [-1, 2.0, None])
def test_an_invalid_size_is_rejected(numel):
    with pytest.raises(ConfigError, match="numel"):
        codec("stc").decode(codec("stc").encode(torch.ones(3)), numel=numel)
