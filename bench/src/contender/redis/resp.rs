//! The part of the protocol of Redis (RESP2) that SET and GET need.

use crate::Result;
use std::io::{BufRead, Read};

/// What ends a line, and a value.
pub const END: &[u8] = b"\r\n";
/// Longest line of an answer: errors are the longest.
const LINE: u64 = 1 << 10;

/// A SET up to its value, which [`END`] follows.
pub fn set_head(key: &str, len: usize) -> Vec<u8> {
    format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${len}\r\n", key.len()).into_bytes()
}

/// A GET.
pub fn get(key: &str) -> Vec<u8> {
    format!("*2\r\n$3\r\nGET\r\n${}\r\n{key}\r\n", key.len()).into_bytes()
}

/// Reads the answer to a SET.
///
/// # Errors
/// The server's words if it refused.
pub fn read_ok(from: &mut impl BufRead) -> Result<()> {
    let line = line(from)?;
    if line == "+OK" { Ok(()) } else { Err(format!("redis answered {line:?}").into()) }
}

/// Reads the answer to a GET into `value`, which has the length that is expected.
///
/// # Errors
/// The server's words if it refused; a value of another length, or none.
pub fn read_value(from: &mut impl BufRead, value: &mut [u8]) -> Result<()> {
    let line = line(from)?;
    if line != format!("${}", value.len()) {
        return Err(format!("redis answered {line:?} where a value of {} bytes was expected", value.len()).into());
    }
    from.read_exact(value)?;
    let mut end = [0; END.len()];
    from.read_exact(&mut end)?;
    if end == END { Ok(()) } else { Err("a value of redis does not end where it said".into()) }
}

fn line(from: &mut impl BufRead) -> Result<String> {
    let mut line = Vec::new();
    from.take(LINE).read_until(b'\n', &mut line)?;
    let line = line.strip_suffix(END).ok_or("redis hung up, or sent a line without end")?;
    Ok(String::from_utf8_lossy(line).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn commands_are_as_the_protocol_has_them() {
        let sent = [set_head("key", 5).as_slice(), b"value", END, &get("key")].concat();
        assert_eq!(sent, b"*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$5\r\nvalue\r\n*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n");
    }

    #[test]
    fn answers_are_read_one_after_the_other() {
        let mut answers = &b"+OK\r\n$5\r\nva\r\nl\r\n$0\r\n\r\n-ERR no\r\n$-1\r\n"[..];
        read_ok(&mut answers).unwrap();
        let mut value = [0; 5];
        read_value(&mut answers, &mut value).unwrap();
        assert_eq!(&value, b"va\r\nl");
        read_value(&mut answers, &mut []).unwrap();
        assert_eq!(read_ok(&mut answers).unwrap_err().to_string(), "redis answered \"-ERR no\"");
        assert!(read_value(&mut answers, &mut value).unwrap_err().to_string().contains("\"$-1\" where a value of 5 bytes"));
        assert!(read_ok(&mut answers).unwrap_err().to_string().contains("hung up"));
    }

    proptest! {
        #[test]
        fn other_bytes_are_errors_and_long_lines_are_not_kept(bytes in prop::collection::vec(any::<u8>(), 0..3000)) {
            let mut from = bytes.as_slice();
            if let Ok(line) = line(&mut from) {
                prop_assert!(line.len() as u64 <= 3 * LINE);
                prop_assert!(bytes.len() - from.len() <= LINE as usize);
            }
            let mut value = [0; 4];
            let read = read_value(&mut bytes.as_slice(), &mut value).is_ok();
            prop_assert_eq!(read, bytes.starts_with(b"$4\r\n") && bytes.get(8..10) == Some(END));
        }
    }
}
