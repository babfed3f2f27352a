// Runs before the first paint, so that the page does not flash in the other theme.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const chosen = localStorage.getItem("penstock-theme");
    document.documentElement.dataset.theme = chosen || (dark.matches ? "dark" : "light");
  };
  dark.addEventListener("change", apply);
  addEventListener("penstock-theme", apply);
  apply();
})();
