// Follows the system's light or dark theme until the button is pressed. Runs last; pages with charts define `drawAll`.
const dark = matchMedia("(prefers-color-scheme: dark)");
let chosen = null;
function applyTheme() {
  document.documentElement.classList.toggle("dark", chosen ?? dark.matches);
  globalThis.drawAll?.();
}
document.getElementById("theme").addEventListener("click", () => { chosen = !(chosen ?? dark.matches); applyTheme(); });
dark.addEventListener("change", applyTheme);
applyTheme();
document.documentElement.dataset.ready = "yes";
