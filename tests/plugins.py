"""Install a plugin package for a test: real entry points in a folder on the import path."""

from pathlib import Path


def install(folder: Path, package: str, **entry_points: list[str]) -> Path:
    """Write the metadata of a package to `folder`, and return the folder.

    `entry_points`: group of fedcomp → lines such as `name = module:object`.
    """
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    groups = [f"[fedcomp.{group}]\n" + "\n".join(lines) for group, lines in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(groups) + "\n")
    return folder
