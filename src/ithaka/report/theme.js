// Light or dark: as the system has it, until the button is pressed. Runs last; a page that draws has a `drawAll`.
const dark = matchMedia("(prefers-color-scheme: dark)");
let chosen = null;
function theme() {
  document.documentElement.classList.toggle("dark", chosen ?? dark.matches);
  globalThis.drawAll?.();
}
document.getElementById("theme").addEventListener("click", () => { chosen = !(chosen ?? dark.matches); theme(); });
dark.addEventListener("change", theme);
theme();
document.documentElement.dataset.ready = "yes";
