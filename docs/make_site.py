"""Write the pages of the site to build/docs: docs/, and a page for every file of the repository
that they link to.

The lab notebook and the tests are evidence that pages link to; the navigation and the search leave
them out."""

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
EVIDENCE = ("LOG.md", "log", "tests")
NOT_SEARCHED = "---\nsearch: {exclude: true}\n---\n"
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".jinja": "jinja", ".toml": "toml"}


def page_of(file: Path) -> Path:
    """The page that shows a file of the repository, relative to the site's root."""
    path = file.relative_to(ROOT)
    if path.parts[0] == "docs":
        return Path(*path.parts[1:])
    return Path("source", path if path.suffix == ".md" else f"{path}.md")


def linked_files(text: str, folder: Path) -> set[Path]:
    """The files of the repository that a page links to, outside code."""
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    targets = {(folder / path).resolve() for _, path, _ in LINK.findall(prose) if "://" not in path}
    return {target for target in targets if target.is_file() and target.is_relative_to(ROOT)}


def render_page(file: Path) -> str:
    """The page's text, with links that lead to other pages of the site."""
    text = file.read_text(encoding="utf-8")
    page = page_of(file)
    if file.suffix != ".md":
        return (
            f"# {file.name}\n\n```{LANGUAGES.get(file.suffix, '')} "
            f'title="{file.relative_to(ROOT)}"\n{text}```\n'
        )

    def redirect(link: re.Match[str]) -> str:
        target = (file.parent / link[2]).resolve()
        if "://" in link[2] or not target.is_file():
            return link[0]
        # as mkdocs makes them; GitHub keeps a hyphen for every space
        anchor = re.sub("-+", "-", link[3])
        return f"{link[1]}{'../' * (len(page.parts) - 1)}{page_of(target).as_posix()}{anchor}"

    # output: its columns must not wrap
    text = re.sub(r"^```\n(?=\$ )", "```console\n", text, flags=re.M)
    parts = re.split(r"(```.*?```)", text, flags=re.S)
    return "".join(part if part.startswith("```") else LINK.sub(redirect, part) for part in parts)


def make_site(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "site.css", out)
    waiting = sorted((ROOT / "docs").rglob("*.md"))
    done = set[Path]()
    while waiting:
        file = waiting.pop()
        if file in done:
            continue
        done.add(file)
        target = out / page_of(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix in (".png", ".svg"):
            shutil.copy(file, target)
            continue
        head = NOT_SEARCHED if file.relative_to(ROOT).parts[0] in EVIDENCE else ""
        target.write_text(head + render_page(file), encoding="utf-8")
        if file.suffix == ".md":
            waiting += linked_files(file.read_text(encoding="utf-8"), file.parent)


if __name__ == "__main__":
    make_site(ROOT / "build" / "docs")
