//! The binary; all of its code is in the library of the same crate.

fn main() -> std::process::ExitCode {
    simplicit_cli::main()
}
