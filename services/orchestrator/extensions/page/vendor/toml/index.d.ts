export * from "smol-toml";
