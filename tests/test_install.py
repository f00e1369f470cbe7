"""scripts/install.py: the settings of pip that are passed to uv. Each run of `make ci` in a fresh checkout installs with it."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "install.py"


def test_pip_settings_include_files_and_environment_variables(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    install = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(install)
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://a.example/simple\n[install]\ncert = /etc/a.pem\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://b.example https://c.example")
    monkeypatch.delenv("PIP_CERT", raising=False)
    settings = install.pip_settings()
    assert settings["index-url"] == "https://a.example/simple"
    assert settings["cert"] == "/etc/a.pem"
    assert settings["extra-index-url"].split() == ["https://b.example", "https://c.example"]
