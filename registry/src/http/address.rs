//! The source address of a request: that of its connection, or the one that proxies in front of the
//! registry say.

use axum::http::{Extensions, HeaderMap, HeaderName};
use std::net::{IpAddr, SocketAddr};

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// The other end of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub(crate) IpAddr);

/// The source address of a request that came through so many proxies. Each of them adds the address
/// of its own client at the end of `X-Forwarded-For`, so what a client writes there itself is never
/// read.
pub(crate) fn source(extensions: &Extensions, headers: &HeaderMap, proxies: usize) -> Option<IpAddr> {
    let peer = extensions.get::<Peer>().map(|peer| peer.0.to_canonical());
    if proxies == 0 {
        return peer;
    }
    // A proxy may add to the line that the client sent: what is no text there must not hide what is
    // behind it.
    let values = headers.get_all(FORWARDED_FOR).iter().flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    let said: Vec<&[u8]> = values.collect();
    let nearest = said.get(said.len().saturating_sub(proxies));
    nearest.and_then(|text| parse(std::str::from_utf8(text).ok()?.trim())).or(peer)
}

/// An address, with or without a port.
fn parse(text: &str) -> Option<IpAddr> {
    let address = text.parse::<IpAddr>().ok().or_else(|| text.parse::<SocketAddr>().ok().map(|address| address.ip()));
    address.map(|address| address.to_canonical())
}

/// The network that counts as one caller: a host with IPv6 usually has 2⁶⁴ addresses.
pub(crate) fn network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(address) => {
            let mut segments = address.segments();
            segments[4..].fill(0);
            IpAddr::from(segments)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(forwarded: &[&str], proxies: usize) -> Option<String> {
        let (mut extensions, mut headers) = (Extensions::new(), HeaderMap::new());
        extensions.insert(Peer([10, 0, 0, 1].into()));
        for value in forwarded {
            headers.append(FORWARDED_FOR, value.parse().unwrap());
        }
        source(&extensions, &headers, proxies).map(|address| address.to_string())
    }

    #[test]
    fn only_the_proxies_in_front_are_believed() {
        let own = Some("10.0.0.1".to_owned());
        assert_eq!(found(&[], 0), own);
        assert_eq!(found(&["1.2.3.4"], 0), own, "without a proxy a client could claim any address");
        assert_eq!(found(&["6.6.6.6, 1.2.3.4"], 1).as_deref(), Some("1.2.3.4"), "the client wrote the first one");
        assert_eq!(found(&["6.6.6.6", "1.2.3.4, 10.0.0.2"], 2).as_deref(), Some("1.2.3.4"));
        assert_eq!(found(&["1.2.3.4"], 2).as_deref(), Some("1.2.3.4"), "a request that came past the outer proxy");
        assert_eq!(found(&["[2001:db8::1]:443"], 1).as_deref(), Some("2001:db8::1"));
        assert_eq!(found(&["::ffff:1.2.3.4"], 1).as_deref(), Some("1.2.3.4"));
        for none in ["", "unknown", "1.2.3.4.5"] {
            assert_eq!(found(&[none], 1), own, "{none:?}");
        }
        assert_eq!(found(&[], 1), own);
        // A client that would rather be its proxy.
        let (mut extensions, mut headers) = (Extensions::new(), HeaderMap::new());
        extensions.insert(Peer([10, 0, 0, 1].into()));
        headers.append(FORWARDED_FOR, axum::http::HeaderValue::from_bytes(b"\xff\xfe, 1.2.3.4").unwrap());
        assert_eq!(source(&extensions, &headers, 1), Some([1, 2, 3, 4].into()));
    }

    #[test]
    fn addresses_of_one_ipv6_network_are_one_caller() {
        let of = |text: &str| network(text.parse().unwrap());
        assert_eq!(of("2001:db8:0:1:2:3:4:5"), of("2001:db8:0:1:ffff::1"));
        assert_ne!(of("2001:db8:0:1::1"), of("2001:db8:0:2::1"));
        assert_ne!(of("1.2.3.4"), of("1.2.3.5"));
    }
}
