//! The whole of the compose file on loopback: two registries behind Caddy with the committed
//! settings, over a PostgreSQL and an S3 server of their own. Each part is killed once.

mod long {
    use crate::deploy::compose::{Compose, log_in, logged_in, make_bucket, start};
    use crate::deploy::files::text;
    use pfr_testkit::postgres::Cluster;
    use pfr_testkit::s3;
    use pfr_tests::{Pf, Registry, Shape, SnapshotDir, files, own_address, skip, wait_for};
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::path::Path;
    use std::process::{Child, Command, Stdio};

    /// The proxy, with the Caddyfile of the repository on an address of this process.
    struct Proxy {
        folder: tempfile::TempDir,
        registries: String,
        address: String,
        child: Child,
    }

    impl Proxy {
        fn start(registries: &[Registry]) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let address = TcpListener::bind((own_address(), 0)).unwrap().local_addr().unwrap().to_string();
            // Only this differs: where it listens, and that it has no administration.
            let global = format!("{{\n\tadmin off\n\tauto_https off\n\tdefault_bind {}\n}}\n", own_address());
            std::fs::write(folder.path().join("Caddyfile"), global + &text("deploy/compose/Caddyfile")).unwrap();
            let registries = registries.iter().map(Registry::address).collect::<Vec<_>>().join(" ");
            let child = Self::spawn(folder.path(), &address, &registries);
            let proxy = Self { folder, registries, address, child };
            proxy.wait();
            proxy
        }

        fn spawn(folder: &Path, address: &str, registries: &str) -> Child {
            Command::new("caddy")
                .args(["run", "--adapter", "caddyfile", "--config"])
                .arg(folder.join("Caddyfile"))
                .env_clear()
                .env("HOME", folder)
                .env("PF_SITE", format!("http://{address}"))
                .env("PF_REGISTRIES", registries)
                .env("PATH", std::env::var_os("PATH").unwrap_or_default())
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap()
        }

        fn url(&self) -> String {
            format!("http://{}", self.address)
        }

        /// Waits until a registry answers through it.
        fn wait(&self) {
            wait_for("the proxy", 120, || ready(&self.address).ok().filter(|answer| answer.starts_with("HTTP/1.1 200")));
        }

        fn kill(&mut self) {
            drop(self.child.kill());
            drop(self.child.wait());
        }

        fn restart(&mut self) {
            self.kill();
            self.child = Self::spawn(self.folder.path(), &self.address, &self.registries);
        }
    }

    impl Drop for Proxy {
        fn drop(&mut self) {
            self.kill();
        }
    }

    fn ready(address: &str) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(address)?;
        write!(stream, "GET /readyz HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// A push of a new snapshot and a pull of the first one, on their way through the proxy.
    fn begin(pf: &Pf, round: usize) -> [Child; 2] {
        let pages: Vec<u64> = (0..400).map(|page| 10_000 * (round as u64 + 1) + page).collect();
        let new = SnapshotDir::write(&pf.path(&format!("new-{round}")), Shape::SMALL, &pages);
        let (tag, out) = (format!("team/agent:new-{round}"), pf.path(&format!("out-{round}")));
        let patient = ["--retries", "120"];
        let push = pf.command(&[&["push", new.arg(), &tag][..], &patient].concat()).spawn().unwrap();
        let pull = pf.command(&[&["pull", "team/agent:first", out.to_str().unwrap()][..], &patient].concat()).spawn().unwrap();
        [push, pull]
    }

    fn end(pf: &Pf, children: [Child; 2], round: usize, what: &str, first: &Path) {
        for child in children {
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
        }
        assert!(files(&pf.path(&format!("out-{round}"))) == files(first), "{what}: the pulled snapshot differs");
        pf.run(&["verify", &format!("team/agent:new-{round}"), "--retries", "120"]).ok();
    }

    #[test]
    fn the_fleet_of_the_compose_file_survives_the_kill_of_any_one_part() {
        if Command::new("caddy").arg("version").stdout(Stdio::null()).status().is_err() {
            return skip("caddy", "the proxy of the compose file, caddy, is not installed");
        }
        let compose = Compose::read(&[]);
        let flags = compose.list("s3", "command").into_iter();
        // Those for addresses, folders and identities are the test's.
        let places = ["-dir=", "-ip=", "-ip.bind=", "-s3.port=", "-s3.config="];
        let flags = flags.filter(|flag| !places.iter().any(|place| flag.starts_with(place))).collect();
        let (mut postgres, mut s3) = (Cluster::start(), s3::Server::start_with(flags));
        make_bucket(&compose, &s3);
        let environment = compose.registry("registry-1", postgres.create_database(), &s3);
        let mut registries = ["registry-1", "registry-2"].map(|name| start(&compose, name, &environment));
        let mut proxy = Proxy::start(&registries);
        let mut pf = logged_in(&registries[0].url(), &environment);
        log_in(&pf, &pf.path("token"), &proxy.url());
        pf.talk_to(&proxy.url());
        let first = SnapshotDir::write(&pf.path("first"), Shape::SMALL, &(0..400).collect::<Vec<_>>());
        pf.run(&["push", first.arg(), "team/agent:first"]).ok();

        // A registry that is gone is not missed: nothing waits for its return.
        for (round, registry) in registries.iter_mut().enumerate() {
            let running = begin(&pf, round);
            registry.kill();
            end(&pf, running, round, "a registry was killed", &first.path);
            registry.restart();
        }
        let running = begin(&pf, 2);
        proxy.kill();
        proxy.restart();
        end(&pf, running, 2, "the proxy was killed", &first.path);
        proxy.wait();
        let running = begin(&pf, 3);
        postgres.kill9();
        postgres.start_again();
        end(&pf, running, 3, "PostgreSQL was killed", &first.path);
        proxy.wait();
        let running = begin(&pf, 4);
        s3.kill9();
        s3.restart();
        end(&pf, running, 4, "the S3 server was killed", &first.path);

        proxy.wait();
        assert_eq!(pf.tags("team/agent").len(), 6, "each push once");
        for registry in &registries {
            log_in(&pf, &pf.path("token"), &registry.url());
            pf.talk_to(&registry.url());
            assert_eq!(pf.tags("team/agent").len(), 6);
            pf.run(&["verify", "team/agent:first"]).ok();
        }
    }
}
