import "./styles/fonts.css";
import "./styles/base.css";
import "./styles/layout.css";
import "./styles/text.css";
import { render } from "preact";
import { App } from "./app";

const root = document.getElementById("app");
if (root) render(<App />, root);
