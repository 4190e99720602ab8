#include "io/safetensors_header.hpp"

#include <gdnflow/error.hpp>

#include "io/safetensors_format.hpp"

#include <set>

#include <fmt/format.h>

namespace gdnflow::safetensors {
namespace {

// Takes the header's JSON event by event. The DOM would keep the last of two equal keys without a
// word and build whatever depth a file asks for; here the grammar is the list of states.
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderReader(std::string_view file) : file_(file) {}

  Header header;

  bool null() override { return unexpected("null"); }
  bool boolean(bool value) override { return unexpected(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { return unexpected(fmt::to_string(value)); }
  bool number_float(number_float_t /*value*/, const string_t& text) override {
    return unexpected(text.size() > 40 ? text.substr(0, 40) + "..." : text);
  }
  bool binary(binary_t& /*value*/) override { return unexpected("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (state_ == State::shape) {
      entry_->shape->push_back(value);
      return true;
    }
    if (state_ == State::offsets) {
      entry_->offsets->push_back(value);
      return true;
    }
    return unexpected(fmt::to_string(value));
  }

  bool string(string_t& value) override {
    if (state_ == State::metadata) {
      header.metadata[name_] = value;
      return true;
    }
    if (state_ == State::entry && field_ == "dtype") {
      entry_->dtype = value;
      return true;
    }
    return unexpected(in_quotes(value));
  }

  bool start_object(std::size_t /*size*/) override {
    switch (state_) {
      case State::start:
        state_ = State::top;
        return true;
      case State::top:
        if (name_ == metadata_key) {
          state_ = State::metadata;
        } else {
          entry_ = &header.entries[name_];
          state_ = State::entry;
          field_.clear();
        }
        return true;
      default:
        return unexpected("an object");
    }
  }

  bool key(string_t& value) override {
    switch (state_) {
      case State::top:
        if (!names_.insert(value).second) refuse(fmt::format("{} stands twice", in_quotes(value)));
        name_ = value;
        return true;
      case State::metadata:
        if (header.metadata.contains(value)) {
          refuse(fmt::format("{}: {} stands twice", metadata_key, in_quotes(value)));
        }
        name_ = value;
        return true;
      default:
        field_ = value;
        check_field();
        return true;
    }
  }

  bool end_object() override {
    state_ = state_ == State::top ? State::end : State::top;
    return true;
  }

  bool start_array(std::size_t /*size*/) override {
    if (state_ == State::entry && field_ == "shape") {
      entry_->shape.emplace();
      state_ = State::shape;
      return true;
    }
    if (state_ == State::entry && field_ == "data_offsets") {
      entry_->offsets.emplace();
      state_ = State::offsets;
      return true;
    }
    return unexpected("an array");
  }

  bool end_array() override {
    state_ = State::entry;
    return true;
  }

  bool parse_error(std::size_t position, const std::string& /*token*/,
                   const nlohmann::json::exception& /*error*/) override {
    refuse(fmt::format("the header is no JSON: it stops making sense at its byte {}", position));
  }

 private:
  enum class State { start, top, metadata, entry, shape, offsets, end };

  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(ErrorCode::format, fmt::format("{}: {}", file_, what));
  }

  void check_field() const {
    const auto once = [&](bool stands) {
      if (stands) refuse(fmt::format("tensor {}: {} stands twice", in_quotes(name_), field_));
    };
    if (field_ == "dtype") {
      once(entry_->dtype.has_value());
    } else if (field_ == "shape") {
      once(entry_->shape.has_value());
    } else if (field_ == "data_offsets") {
      once(entry_->offsets.has_value());
    } else {
      refuse(fmt::format("tensor {}: expected dtype, shape and data_offsets, got {}",
                         in_quotes(name_), in_quotes(field_)));
    }
  }

  bool unexpected(const std::string& got) const {
    switch (state_) {
      case State::start:
      case State::end:
        refuse(fmt::format("header: expected an object, got {}", got));
      case State::top:
        refuse(fmt::format("tensor {}: expected an object, got {}", in_quotes(name_), got));
      case State::metadata:
        refuse(
            fmt::format("{} {}: expected a string, got {}", metadata_key, in_quotes(name_), got));
      case State::entry:
        refuse(fmt::format("tensor {}, {}: expected {}, got {}", in_quotes(name_), field_,
                           field_ == "dtype" ? "a string" : "an array", got));
      case State::shape:
      case State::offsets:
        refuse(fmt::format("tensor {}, {}: expected integers from 0 to 2^64 - 1, got {}",
                           in_quotes(name_), field_, got));
    }
    return false;
  }

  std::string_view file_;
  State state_ = State::start;
  std::string name_;
  std::string field_;
  Entry* entry_ = nullptr;
  std::set<std::string, std::less<>> names_;
};

}  // namespace

Header parse_header(std::string_view json, std::string_view file) {
  HeaderReader reader(file);
  if (!nlohmann::json::sax_parse(json, &reader)) {
    throw Error(ErrorCode::internal, fmt::format("{}: the header's reader stopped", file));
  }
  return std::move(reader.header);
}

}  // namespace gdnflow::safetensors
