"""Plugins by name: the codecs, memories, strategies, tasks and attacks of fedcomp and of other installed packages.

A built-in plugin is a class or function with an attribute `name`. Each kind of plugin has its package, such as `fedcomp/codecs`.
Other packages declare plugins as entry points in their pyproject.toml, such as a codec named `mine`:

    [project.entry-points."fedcomp.codecs"]
    mine = "my_package.my_module:MyCodec"

An entry point is imported only when its name is used or when all plugins are listed. An entry point cannot replace a built-in plugin.
"""

import pkgutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import FunctionType
from typing import Any, Generic, TypeVar

from .errors import SpecError

T = TypeVar("T")


class PluginRegistry(Mapping[str, T], Generic[T]):
    """A mapping from names to the plugins of one kind, sorted by name.

    Looking up a plugin imports the plugin. Iterating over the names imports no entry point. `package` is the package with the built-in
    plugins, and `group` is the group of entry points for other plugins. `accepts(value)` returns whether a class or function is a plugin of
    this kind. `validate(name, plugin)` is called before the first use of a plugin, and raises SpecError if the plugin is invalid.
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

    def __getitem__(self, name: str) -> T:
        """Return a plugin. Raises KeyError for an unknown name, and SpecError for an entry point that cannot be used."""
        if name in self._builtin:
            return self._builtin[name]
        if name not in self._loaded:
            self._loaded[name] = self._load(name, self._provided[name])
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._builtin or name in self._loaded or name in self._provided

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._builtin, *self._provided}))

    def __len__(self) -> int:
        return len({*self._builtin, *self._provided})

    def available(self) -> dict[str, T]:
        """Import and return all plugins. An entry point that cannot be used is omitted with a warning."""
        plugins: dict[str, T] = {}
        for name in self:
            try:
                plugins[name] = self[name]
            except SpecError as error:
                warnings.warn(str(error), stacklevel=3)
        for entry in entry_points(group=self.group):
            if entry.name in self._builtin:
                warnings.warn(
                    f"the entry point '{entry.name}' of {self.group} in {_provider(entry)} is not used, because a built-in plugin "
                    "has the same name",
                    stacklevel=3,
                )
        return plugins

    @cached_property
    def _builtin(self) -> dict[str, T]:
        package = import_module(self.package)
        plugins: dict[str, T] = {}
        for info in pkgutil.iter_modules(package.__path__, f"{self.package}."):
            module = import_module(info.name)
            for value in vars(module).values():
                if not _is_defined_in(info.name, value):
                    continue
                name = vars(value).get("name")
                if isinstance(name, str) and self.accepts(value):
                    if name in plugins:
                        raise AssertionError(
                            f"{plugins[name]} and {value} are both named '{name}'; rename one of them"
                        )
                    self.validate(name, value)
                    plugins[name] = value
        return plugins

    @property
    def _provided(self) -> dict[str, list[EntryPoint]]:
        """The entry points by name, except for entry points that have the name of a built-in plugin."""
        entries: dict[str, list[EntryPoint]] = {}
        for entry in entry_points(group=self.group):
            if entry.name not in self._builtin:
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


def _provider(entry: EntryPoint) -> str:
    return f"the package {entry.dist.name}" if entry.dist else entry.module


def subclass_of(base: type) -> Callable[[Any], bool]:
    """Return a function that checks whether a value is a subclass of `base`."""
    return lambda value: isinstance(value, type) and issubclass(value, base)
