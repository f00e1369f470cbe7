"""Plugins by name: codecs, memories, strategies, tasks and attacks, from fedcomp, from a user's files and from other installed packages.

A plugin is a class or function with an attribute `name`. The built-in plugins of each kind are in a package such as `fedcomp/codecs`. The
environment variable FEDCOMP_PLUGINS names Python files with a user's plugins. Other packages declare plugins as entry points in their
pyproject.toml. This entry point declares a codec named `mine`:

    [project.entry-points."fedcomp.codecs"]
    mine = "my_package.my_module:MyCodec"

Neither a file nor an entry point can replace a built-in plugin.
"""

import os
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Generic, TypeVar

from .errors import ConfigError, SpecError

T = TypeVar("T")
FILES_VARIABLE = "FEDCOMP_PLUGINS"  # environment variable with paths of files, separated like the folders in PATH


class PluginRegistry(Mapping[str, T], Generic[T]):
    """A mapping from names to the plugins of one kind, sorted by name.

    A lookup imports the plugin. Iteration over the names imports the files that FEDCOMP_PLUGINS names, but no entry point. A lookup and an
    iteration raise ConfigError if one of these files cannot be used.

    `package`: package with the built-in plugins. `group`: group of entry points of other packages. `accepts(value)` returns whether a class
    or function is a plugin of this kind. `validate(name, plugin)` is called before the first use of a plugin, and raises SpecError if the
    plugin is invalid.
    """

    def __init__(
        self,
        package: str,
        group: str,
        accepts: Callable[[Any], bool],
        validate: Callable[[str, T], None] = lambda name, plugin: None,
    ):
        self.package, self.group, self.accepts, self.validate = package, group, accepts, validate
        self._loaded: dict[str, T] = {}  # imported plugins of other packages, by name
        self._in_files: dict[Path, dict[str, T]] = {}  # plugins of a user, by file and name

    def __getitem__(self, name: str) -> T:
        """Return the plugin named `name`. Raises KeyError for an unknown name, and SpecError for an entry point that cannot be used."""
        own = self._builtin_and_user
        if name in own:
            return own[name]
        if name not in self._loaded:
            self._loaded[name] = self._load(name, self._entries[name])
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._builtin_and_user or name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._builtin_and_user, *self._entries}))

    def __len__(self) -> int:
        return len({*self._builtin_and_user, *self._entries})

    def available(self) -> dict[str, T]:
        """Import and return all plugins. An entry point that cannot be used is omitted with a warning."""
        plugins: dict[str, T] = {}
        for name in self:
            try:
                plugins[name] = self[name]
            except SpecError as error:
                warnings.warn(str(error), stacklevel=3)
        for entry in _entry_points(self.group, *sys.path):
            if entry.name in self._builtin_and_user:
                owner = "a built-in plugin" if entry.name in self._builtin else FILES_VARIABLE
                warnings.warn(
                    f"the entry point '{entry.name}' of {self.group} in {_provider(entry)} is not used, because {owner} "
                    "has the same name",
                    stacklevel=3,
                )
        return plugins

    @cached_property
    def _builtin(self) -> dict[str, T]:
        package = import_module(self.package)
        plugins: dict[str, T] = {}
        for info in pkgutil.iter_modules(package.__path__, f"{self.package}."):
            self._add_from(import_module(info.name), plugins)
        return plugins

    @property
    def _builtin_and_user(self) -> dict[str, T]:
        """The built-in plugins and the plugins in the files that FEDCOMP_PLUGINS names, by name."""
        if not (files := os.environ.get(FILES_VARIABLE)):
            return self._builtin
        plugins = dict(self._builtin)
        for file in filter(None, files.split(os.pathsep)):
            path = Path(file).absolute()
            if path not in self._in_files:
                self._in_files[path] = self._add_from(_module_in(path), {})
            for name, plugin in self._in_files[path].items():
                if plugins.setdefault(name, plugin) is not plugin:
                    raise ConfigError(
                        f"{FILES_VARIABLE}: {file} defines '{name}', but another plugin in {self.group} has this name; choose another name"
                    )
        return plugins

    def _add_from(self, module: ModuleType, plugins: dict[str, T]) -> dict[str, T]:
        """Add the plugins that a module defines to `plugins`, and return `plugins`."""
        for value in vars(module).values():
            if not _is_defined_in(module.__name__, value):
                continue
            name = vars(value).get("name")
            if isinstance(name, str) and self.accepts(value):
                if name in plugins:
                    raise SpecError(
                        f"{plugins[name]} and {value} are both named '{name}'; rename one of them"
                    )
                self.validate(name, value)
                plugins[name] = value
        return plugins

    @property
    def _entries(self) -> dict[str, list[EntryPoint]]:
        """The entry points by name, except for the names of built-in plugins and of a user's plugins."""
        entries: dict[str, list[EntryPoint]] = {}
        for entry in _entry_points(self.group, *sys.path):
            if entry.name not in self._builtin_and_user:
                entries.setdefault(entry.name, []).append(entry)
        return entries

    def _load(self, name: str, entries: list[EntryPoint]) -> T:
        providers = " and ".join(sorted({_provider(entry) for entry in entries}))
        if len({entry.value for entry in entries}) > 1:
            raise SpecError(
                f"the entry point '{name}' of {self.group} is provided by {providers}; uninstall one of them"
            )
        try:
            plugin = entries[0].load()
        except Exception as error:
            raise SpecError(
                f"the entry point '{name}' of {self.group} cannot be imported ({type(error).__name__}: {error}); "
                f"repair or uninstall {providers}"
            ) from error
        if not self.accepts(plugin):
            raise SpecError(
                f"the entry point '{name}' of {self.group} is {plugin!r}, which is not a plugin of this kind; "
                f"repair or uninstall {providers}"
            )
        self.validate(name, plugin)
        return plugin


def _is_defined_in(module: str, value: Any) -> bool:
    return isinstance(value, type | FunctionType) and value.__module__ == module


@cache
def _module_in(path: Path) -> ModuleType:
    """Import a file that FEDCOMP_PLUGINS names. Raises ConfigError if the file cannot be imported."""
    name = f"fedcomp_plugin_{path.stem}"
    found = spec_from_file_location(name, path) if path.suffix == ".py" else None
    if found is None or found.loader is None or not path.is_file():
        raise ConfigError(
            f"{FILES_VARIABLE}: {path} is not a Python file; give the paths of .py files, separated by '{os.pathsep}'"
        )
    # dataclasses look up the module in sys.modules.
    module = sys.modules[name] = module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(
            f"{FILES_VARIABLE}: {path} cannot be imported ({type(error).__name__}: {error}); correct the file"
        ) from error
    return module


@cache
def _entry_points(group: str, *path: str) -> EntryPoints:
    """Return the entry points of a group. `path` is `sys.path`, so that the cache is not used after a change of `sys.path`."""
    return entry_points(group=group)


def _provider(entry: EntryPoint) -> str:
    return f"the package {entry.dist.name}" if entry.dist else entry.module


def subclass_of(base: type) -> Callable[[Any], bool]:
    """Return a function that checks whether a value is a subclass of `base`."""
    return lambda value: isinstance(value, type) and issubclass(value, base)
