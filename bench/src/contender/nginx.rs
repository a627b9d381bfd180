//! nginx with its DAV module: a file server that takes a PUT for each blob, behind the same HTTP
//! client as docker-registry. It neither hashes nor syncs.
//!
//! A pull verifies each blob as it comes, writes it to a file, and ends with one `syncfs`.

use super::http::{Peer, Serves};
use super::{Found, Programs, free_port, install};
use crate::Result;
use crate::usage::{self, Server};
use std::path::{Path, PathBuf};
use std::process::Command;
use tokio::runtime::Runtime;

struct Nginx {
    program: PathBuf,
}

/// Finds the program.
pub fn find(_: &Programs) -> Found {
    let program = usage::find(&["nginx"]).ok_or_else(|| install("nginx", "apt-get install nginx-light"))?;
    Peer::of(Nginx { program })
}

impl Serves for Nginx {
    const DATA: &'static str = "served";

    fn serve(&self, dir: &Path, _: &Runtime) -> Result<(Server, String)> {
        let port = free_port()?;
        let at = dir.display();
        std::fs::create_dir(dir.join(Self::DATA))?;
        // Its workers give up root otherwise, and then cannot write here.
        let user = if rustix::process::geteuid().is_root() { "user root;" } else { "" };
        // Bodies are renamed into place, so they are written to the same file system.
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .iter()
            .map(|what| format!("{what}_temp_path \"{at}/temporary-{what}\";\n"))
            .collect();
        let config = format!(
            "daemon off; worker_processes auto; error_log stderr error; pid \"{at}/nginx.pid\"; {user}\n\
             events {{ worker_connections 1024; }}\n\
             http {{ access_log off; default_type application/octet-stream; sendfile on; keepalive_requests 1000000;\n\
             client_max_body_size 0;\n{temporary}\
             server {{ listen 127.0.0.1:{port}; location / {{ root \"{at}/served\"; dav_methods PUT; }} }} }}\n"
        );
        let path = dir.join("nginx.conf");
        std::fs::write(&path, config)?;
        let mut command = Command::new(&self.program);
        command.args(["-e", "stderr", "-p"]).arg(dir).arg("-c").arg(&path);
        Ok((Server::start(&mut command, port, &dir.join("nginx.log"))?, format!("http://127.0.0.1:{port}")))
    }
}
