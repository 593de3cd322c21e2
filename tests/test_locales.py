"""The texts in each language: none missing, none too many, the English ones as the nodes and the page say them."""

from __future__ import annotations

import re

import pytest

from halo_vae.nodes.specs import CATEGORY, SPECS
from halo_vae.tests.locales import (
    FILES,
    FOLDER,
    LANGUAGES,
    english_categories,
    english_commands,
    english_nodes,
    english_settings,
    leaves,
    read_texts,
)

ENGLISH = {
    "commands": english_commands(),
    "main": {"nodeCategories": {CATEGORY: CATEGORY}, "settingsCategories": english_categories()},
    "nodeDefs": english_nodes(),
    "settings": english_settings(),
}
CHINESE = re.compile(r"[\u4e00-\u9fff]")
# vue-i18n, which ComfyUI's page reads the texts with, takes these for placeholders, links and plurals.
FORMAT = re.compile(r"[{}@|%]")
KEPT = re.compile(r"HALO_VAE_PROFILE|NaN|float16|JSON|torch|LTX-Video|\bauto\b|\bblended\b|-?\b\d+\b")
"""Numbers and words of code, which a translation leaves as they are."""
IN_BOTH = {"Halo VAE", "VAE", "Latent"}
"""Names that are the same in Chinese."""


def test_languages_have_the_files_that_comfyui_gathers() -> None:
    assert {"en", "zh"} <= set(LANGUAGES)
    for language in LANGUAGES:
        assert sorted(path.stem for path in (FOLDER / language).iterdir()) == sorted(FILES)
    assert set(FILES) == set(ENGLISH)


@pytest.mark.parametrize("file", FILES)
def test_english_says_what_nodes_and_page_say(file: str) -> None:
    assert read_texts("en", file) == ENGLISH[file]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("language", [language for language in LANGUAGES if language != "en"])
def test_no_text_is_missing_or_too_many(language: str, file: str) -> None:
    given, wanted = dict(leaves(read_texts(language, file))), dict(leaves(ENGLISH[file]))
    assert wanted.keys() - given.keys() == set()
    assert given.keys() - wanted.keys() == set()
    assert all(isinstance(text, str) and text.strip() == text != "" for text in given.values())


@pytest.mark.parametrize("language", LANGUAGES)
def test_texts_hold_nothing_that_the_page_would_replace(language: str) -> None:
    texts = [text for file in FILES for _, text in leaves(read_texts(language, file))]
    assert [text for text in texts if FORMAT.search(text)] == []


@pytest.mark.parametrize("file", FILES)
def test_chinese_is_chinese(file: str) -> None:
    texts = dict(leaves(read_texts("zh", file)))
    untranslated = {text for text in texts.values() if not CHINESE.search(text)}
    assert untranslated <= IN_BOTH | {"KiB、MiB、GiB", "kB、MB、GB"}
    english = dict(leaves(ENGLISH[file]))
    for path, text in texts.items():
        assert [word for word in KEPT.findall(english[path]) if word not in text] == [], path


def test_names_of_nodes_and_inputs_can_be_told_apart() -> None:
    for language in LANGUAGES:
        nodes = read_texts(language, "nodeDefs")
        assert len({node["display_name"] for node in nodes.values()}) == len(SPECS)
        for node in nodes.values():
            assert len({socket["name"] for socket in node["inputs"].values()}) == len(node["inputs"])
