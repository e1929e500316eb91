//! The binary; everything is in the library beside it.

fn main() -> std::process::ExitCode {
    simplicit_cli::main()
}
