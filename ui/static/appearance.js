// Light or dark before the first paint: the visitor's choice, else the system's. Gradio follows the class on <body>.
(() => {
  const KEY = "beholder.appearance";
  const system = matchMedia("(prefers-color-scheme: dark)");
  const read = () => {
    try {
      return localStorage.getItem(KEY) ?? "auto";
    } catch {
      return "auto"; // storage may be forbidden
    }
  };
  const apply = () => {
    const choice = read();
    const dark = choice === "dark" || (choice === "auto" && system.matches);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    document.body?.classList.toggle("dark", dark);
  };
  window.beholderAppearance = {
    get: read,
    set(choice) {
      try {
        if (choice === "auto") localStorage.removeItem(KEY);
        else localStorage.setItem(KEY, choice);
      } catch {
        document.documentElement.dataset.theme = choice;
      }
      apply();
    },
  };
  system.addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", apply);
  apply();
})();
