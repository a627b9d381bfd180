//! A network that can be cut and tampered with: a TCP proxy on loopback.

use crate::own_address;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// What the proxy does to bytes that come from the registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tamper {
    /// The bytes stay as they are.
    Nothing,
    /// Flips one bit of the byte at this offset of each connection's answers.
    Flip(u64),
}

struct State {
    target: std::sync::Mutex<String>,
    /// Bytes that may still pass before every connection is cut; negative once spent.
    budget: AtomicI64,
    cuts: AtomicU64,
    from_registry: AtomicU64,
    tamper: Tamper,
}

/// A proxy to a registry.
pub struct Proxy {
    address: String,
    state: Arc<State>,
}

impl Proxy {
    /// A proxy that lets everything through.
    #[must_use]
    pub fn to(target: &str, tamper: Tamper) -> Self {
        let listener = TcpListener::bind((own_address(), 0)).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let state = Arc::new(State {
            target: std::sync::Mutex::new(target.to_owned()),
            budget: AtomicI64::new(i64::MAX),
            cuts: AtomicU64::new(0),
            from_registry: AtomicU64::new(0),
            tamper,
        });
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let state = Arc::clone(&shared);
                std::thread::spawn(move || serve(client, &state));
            }
        });
        Self { address, state }
    }

    /// Base URL.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Cuts all connections after `bytes` more bytes (both directions together); new ones then work
    /// again until the next cut.
    pub fn cut_after(&self, bytes: u64) {
        self.state.budget.store(i64::try_from(bytes).unwrap(), Ordering::SeqCst);
    }

    /// How often it has cut.
    #[must_use]
    pub fn cuts(&self) -> u64 {
        self.state.cuts.load(Ordering::SeqCst)
    }

    /// Bytes that came from the registry.
    #[must_use]
    pub fn from_registry(&self) -> u64 {
        self.state.from_registry.load(Ordering::SeqCst)
    }

    /// Bytes that may still pass.
    #[must_use]
    pub fn budget(&self) -> i64 {
        self.state.budget.load(Ordering::SeqCst)
    }
}

fn serve(client: TcpStream, state: &Arc<State>) {
    let target = state.target.lock().unwrap().clone();
    let Ok(server) = TcpStream::connect(target) else { return };
    let (client_copy, server_copy) = (client.try_clone().unwrap(), server.try_clone().unwrap());
    let up = {
        let state = Arc::clone(state);
        std::thread::spawn(move || pump(client, server, &state, false))
    };
    pump(server_copy, client_copy, state, true);
    drop(up.join());
}

fn pump(mut from: TcpStream, mut to: TcpStream, state: &State, from_registry: bool) {
    let mut buffer = vec![0; 64 << 10];
    let mut passed = 0_u64;
    while let Ok(n) = from.read(&mut buffer) {
        if n == 0 {
            break;
        }
        let left = state.budget.fetch_sub(n as i64, Ordering::SeqCst);
        if left <= n as i64 {
            if left > 0 {
                // The piece that reaches the limit is cut there.
                state.cuts.fetch_add(1, Ordering::SeqCst);
                drop(to.write_all(&buffer[..usize::try_from(left).unwrap_or(0)]));
            }
            break;
        }
        if from_registry {
            state.from_registry.fetch_add(n as u64, Ordering::SeqCst);
            if let Tamper::Flip(at) = state.tamper
                && (passed..passed + n as u64).contains(&at)
            {
                buffer[usize::try_from(at - passed).unwrap()] ^= 0x10;
            }
        }
        passed += n as u64;
        if to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    drop(from.shutdown(Shutdown::Both));
    drop(to.shutdown(Shutdown::Both));
}
